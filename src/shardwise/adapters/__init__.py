"""Implements LoRA and QLoRA: small trained matrices beside frozen weights."""
