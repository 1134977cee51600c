"""Reads and writes models and adapters of other libraries."""
