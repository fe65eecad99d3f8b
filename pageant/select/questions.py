"""The questions whose answers make the golden file: each feature and limit, and pairs that matter.

Each changes a plain configuration: bfloat16, 32 and 8 heads of 128, pages of 16, "auto".
"""

from __future__ import annotations

from typing import Any

import torch

from pageant.ranks import ContextParallel
from pageant.types import CacheSpec, Features, Options, Shape

TWO_RANKS = ContextParallel(rank=0, world=2)

QUESTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32 model": {"shape": {"dtype": torch.float32}},
    "fp16 model": {"shape": {"dtype": torch.float16}},
    "head 16": {"shape": {"head_dim": 16}},
    "head 512": {"shape": {"head_dim": 512}},
    "head 192/128": {"shape": {"head_dim": 192, "v_head_dim": 128}},
    "page 1": {"cache": {"page_size": 1}},
    "page 528": {"cache": {"page_size": 528}},
    "layout BHLNC": {"cache": {"layout": "BHLNC"}},
    "window": {"features": {"windows": (128,)}},
    "mixed windows": {"features": {"windows": (128, None)}},
    "soft cap": {"features": {"soft_cap": True}},
    "sinks": {"features": {"sinks": True}},
    "alibi": {"features": {"alibi": True}},
    "draft masks": {"features": {"draft_masks": True}},
    "non-causal": {"features": {"non_causal": True}},
    "lse": {"features": {"lse": True}},
    "fp8 output": {"features": {"out_formats": ("fp8_e4m3",)}},
    "nvfp4 output": {"features": {"out_formats": ("nvfp4",)}},
    "3 drafts": {"options": {"speculative_tokens": 3}},
    "nc drafts": {"options": {"speculative_tokens": 3, "non_causal_drafts": True}},
    "adaptive": {"options": {"adaptive": True}},
    "model-dtype q": {"options": {"quantize_query": False}},
    "4 splits": {"options": {"debug_splits": 4}},
    "invariant": {"options": {"invariant": True}},
    "2 ranks": {"options": {"context_parallel": TWO_RANKS}},
    "=pageant": {"options": {"kernels": "pageant"}},
    "=reference": {"options": {"kernels": "reference"}},
    "=flashinfer": {"options": {"kernels": "flashinfer"}},
}

# Of FlashInfer's kernels alone; three drafts, and adaptive, where nothing else is said.
FLASHINFER_QUESTIONS: dict[str, dict[str, Any]] = {
    **{name: changes for name, changes in QUESTIONS.items() if not name.startswith("=")},
    "no drafts": {"options": {"speculative_tokens": 0}},
    "not adaptive": {"options": {"adaptive": False}},
    "head 64": {"shape": {"head_dim": 64}},
    "head 256": {"shape": {"head_dim": 256}},
    "head 512, sinks": {"shape": {"head_dim": 512}, "features": {"sinks": True}},
    "page 64": {"cache": {"page_size": 64}},
    "page 128": {"cache": {"page_size": 128}},
    "page 128, group 1": {"cache": {"page_size": 128}, "shape": {"num_q_heads": 8}},
    "page 128, soft cap": {"cache": {"page_size": 128}, "features": {"soft_cap": True}},
    "page 128, 2 ranks": {
        "cache": {"page_size": 128},
        "options": {"context_parallel": TWO_RANKS},
    },
    "page 128, 2 ranks, no cubins": {
        "cache": {"page_size": 128},
        "cubins": False,
        "options": {"context_parallel": TWO_RANKS},
    },
    "2 ranks, no cubins": {"cubins": False, "options": {"context_parallel": TWO_RANKS}},
    "page 128, no cubins": {"cache": {"page_size": 128}, "cubins": False},
    "page 1024, model-dtype q": {
        "cache": {"page_size": 1024},
        "options": {"quantize_query": False},
    },
    "group 1": {"shape": {"num_q_heads": 8}},
    "layout BLHNC": {"cache": {"layout": "BLHNC"}},
    "sinks, soft cap": {"features": {"sinks": True, "soft_cap": True}},
    "sinks, alibi": {"features": {"sinks": True, "alibi": True}},
    "sinks, model-dtype q": {"features": {"sinks": True}, "options": {"quantize_query": False}},
    "sinks, 2 ranks": {"features": {"sinks": True}, "options": {"context_parallel": TWO_RANKS}},
    "soft cap, 2 ranks": {
        "features": {"soft_cap": True},
        "options": {"context_parallel": TWO_RANKS},
    },
    "nc drafts, 2 ranks": {
        "options": {"non_causal_drafts": True, "context_parallel": TWO_RANKS},
    },
    "nvfp4 output, tables on": {
        "features": {"out_formats": ("nvfp4",)},
        "options": {"table_kernels": True},
    },
    "no cubins": {"cubins": False},
    "no cubins, sinks": {"cubins": False, "features": {"sinks": True}},
    "tables off": {"options": {"table_kernels": False}},
    "tables off, sinks": {"features": {"sinks": True}, "options": {"table_kernels": False}},
    "tables on": {"options": {"table_kernels": True}},
    "tables on, model-dtype q": {"options": {"table_kernels": True, "quantize_query": False}},
    "invariant, sinks": {"features": {"sinks": True}, "options": {"invariant": True}},
}
FLASHINFER_OPTIONS = {"kernels": "flashinfer", "speculative_tokens": 3, "adaptive": True}


def configuration(
    fmt: str, changes: dict[str, Any], **defaults: Any
) -> tuple[Shape, CacheSpec, Features, Options]:
    """The plain configuration with a cache format and the changes of a question.

    Args:
        fmt: the cache format.
        changes: parts of the configuration and what differs in them.
        defaults: of the options.
    """
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes.get("shape", {})}
    return (
        Shape(**shape),
        CacheSpec(format=fmt, **changes.get("cache", {})),
        Features(**changes.get("features", {})),
        Options(**{**defaults, **changes.get("options", {})}),
    )
