"""Computes what the plain model computes in faster ways, and chooses among them."""
