"""Benchmarks of CUDA devices: graph replays against the libraries that are installed."""
