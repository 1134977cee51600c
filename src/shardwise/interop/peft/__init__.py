"""Reads and writes adapters in PEFT's format, and says which layers an adapter is for."""
