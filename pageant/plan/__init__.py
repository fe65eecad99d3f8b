"""From a batch to a frozen Plan: validation, split, work lists, buffers."""
