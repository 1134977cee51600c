"""Data parallelism: whole replicas, and low-precision weights on one rank."""
