"""Every byte of the cache: formats (how an element is stored) and layouts (where it lies)."""
