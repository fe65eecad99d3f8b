"""Functional forms: the same kernels, for callers that keep no Attention.

Each call plans anew; engines that run many layers a step should hold a ``pageant.Attention``.
"""

from pageant.cache.quantize import dequantize, quantize
from pageant.kernels.merge import merge_states
from pageant.ops.attention import paged_attention, ragged_attention
from pageant.ops.pages import dequantize_pages, page_indices, write_pages

__all__ = [
    "dequantize",
    "dequantize_pages",
    "merge_states",
    "page_indices",
    "paged_attention",
    "quantize",
    "ragged_attention",
    "write_pages",
]
