"""Keeps optimizer states and parameters in CPU memory and on NVMe disks."""
