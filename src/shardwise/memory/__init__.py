"""Bounds what a rank keeps between forward and backward: recompute (activation checkpointing), activation offload, and
the account of all bytes."""
