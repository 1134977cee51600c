"""Holds the optimizers: built by name, learning rates, gradient norm, loss scaling, low-bit states, master weights,
offload."""
