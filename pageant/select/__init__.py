"""Policy as data: which kernel serves which configuration, and why the others do not."""
