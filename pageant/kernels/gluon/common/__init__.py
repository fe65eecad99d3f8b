"""What the kernels here share; each file is inlined into those that use it."""
