"""Adapters: Pageant as the attention of other libraries. Each file needs its library."""
