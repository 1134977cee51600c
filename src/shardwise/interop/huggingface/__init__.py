"""Reads and writes Hugging Face directories: config.json and safetensors."""
