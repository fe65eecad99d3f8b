"""Kernels of other libraries, where those are installed."""
