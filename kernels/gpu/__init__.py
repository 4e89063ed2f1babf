"""Triton kernels and their launchers, one file an op; imported only when a tensor lies on a CUDA device."""
