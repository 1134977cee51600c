"""Describes what a cluster is: the machine found here, a line somebody typed, a file, the table of GPUs."""
