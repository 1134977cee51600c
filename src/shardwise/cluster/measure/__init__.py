"""Measures what this machine really does: matmuls, memory, disks and links, timed."""
