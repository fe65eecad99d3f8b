"""Arithmetic. Kernels choose nothing: `select` picks one, `plan` says what it works on."""
