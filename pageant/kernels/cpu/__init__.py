"""Kernels for the host: numba for decode, torch for prefill."""
