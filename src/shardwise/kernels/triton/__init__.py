"""Kernels in Triton. Imported only where there is CUDA."""
