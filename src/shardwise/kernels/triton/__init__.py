"""Holds the kernels in Triton. Imported only where there is CUDA."""
