"""Benchmarks: cases and peers, and what each cache format costs a model in perplexity."""
