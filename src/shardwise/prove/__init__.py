"""Proves layouts: the plain single-process model, and a layout compared with it."""
