"""Adapters in PEFT's format, and which layers an adapter is for."""
