"""Kernels in Triton, for every NVIDIA GPU since Turing."""
