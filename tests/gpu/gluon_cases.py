"""Cases for the Gluon decode: every format, head size, page size and feature, and what combines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from tests.inputs import Case

BF16: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "format": "bf16",
    "kv_heads": 8,
    "group": 4,
    "head_dim": 128,
    "v_head_dim": 128,
    "page_size": 16,
}
SINGLE = ((1, 1), (1, 16), (1, 17), (0, 5), (1, 300), (1, 999), (1, 64), (1, 2048))
DRAFTS = ((4, 4), (1, 33), (3, 300), (0, 0), (4, 1000), (2, 2), (4, 129), (1, 2047))
LONG_DRAFTS = ((8, 8), (5, 40), (8, 300), (1, 1), (8, 1500), (7, 17))
WINDOW = {"window": 37}
BENT = {"soft_cap": 2.0, "alibi": True, "sinks": True, "scales": True}
ALL = {**WINDOW, **BENT, "speculative": 3}
FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8", "fp8_e4m3_token_head", "nvfp4", "nvfp4_4over6")


def named() -> dict[str, Case]:
    """Each case by its name."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp16": {"dtype": torch.float16, "format": "fp16"},
        "window": WINDOW,
        "cap": {"soft_cap": 2.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi": True},
        "drafts": {"speculative": 3, "lengths": DRAFTS},
        "drafts 8": {"speculative": 7, "lengths": LONG_DRAFTS},
        "drafts, window": {"speculative": 3, "lengths": DRAFTS, **WINDOW},
        "mask": {"speculative": 3, "lengths": DRAFTS, "drafts": "mask"},
        "mask, everything": {"lengths": DRAFTS, "drafts": "mask", **ALL},
        "trees 8": {"speculative": 7, "lengths": LONG_DRAFTS, "drafts": "parents"},
        "non-causal": {"speculative": 3, "lengths": DRAFTS, "causal": False},
        "by request": {"speculative": 3, "lengths": DRAFTS, "causal": (True, False) * 4},
        "by request, all": {"lengths": DRAFTS, "causal": (True, False) * 4, **ALL},
        "cross": {"cross": True},
        "padding": {"padding": 5},
        "one split": {"splits": 1},
        "three splits": {"splits": 3},
        "seven splits": {"splits": 7, "speculative": 3, "lengths": DRAFTS},
        "64": {"head_dim": 64, "v_head_dim": 64, "group": 8},
        "96": {"head_dim": 96, "v_head_dim": 96},
        "192/128": {"head_dim": 192, "group": 2},
        "256": {"head_dim": 256, "v_head_dim": 256, "group": 2},
        "256 drafts": {
            "head_dim": 256, "v_head_dim": 256, "group": 2, "speculative": 7,
            "lengths": LONG_DRAFTS,
        },
        "MHA": {"kv_heads": 16, "group": 1},
        "1 head": {"kv_heads": 1, "group": 8},
        "2 heads": {"kv_heads": 2, "group": 8},
        "3 heads": {"kv_heads": 3, "group": 5, "page_size": 3},
        "4 heads, drafts": {"kv_heads": 4, "group": 8, "speculative": 3, "lengths": DRAFTS},
        "6 heads": {"kv_heads": 6, "group": 2},
        "64 a group": {"kv_heads": 1, "group": 64},
        "1 head, all": {"kv_heads": 1, "group": 8, "lengths": DRAFTS, **ALL},
        "page 1": {"page_size": 1},
        "page 1, 1 head": {"page_size": 1, "kv_heads": 1, "window": 37},
        "page 48": {"page_size": 48},
        "page 128": {"page_size": 128},
        "NHD": {"memory": "LBNHC"},
        "heads outermost": {"memory": "LHBNC"},
        "strided": {"memory": "strided"},
        "strided fp8": {"memory": "strided", "format": "fp8_e4m3"},
        "strided nvfp4": {"memory": "separate", "format": "nvfp4"},
        "swizzled": {"format": "nvfp4", "swizzled": True},
        "fp8 96": {"format": "fp8_e4m3", "head_dim": 96, "v_head_dim": 96},
        "fp8 192/128": {"format": "fp8_e4m3", "head_dim": 192, "group": 2},
        "fp8 page 1": {"format": "fp8_e4m3", "page_size": 1},
        "fp8 fp16": {"format": "fp8_e4m3", "dtype": torch.float16},
        "fp8 query": {"format": "fp8_e4m3", "query_scale": 0.25},
    }  # fmt: skip
    for name in FORMATS:
        cases[name] = {"format": name, "scales": True}
        cases[f"{name} all"] = {"format": name, "lengths": DRAFTS, **ALL}
    for name in ("fp8_e4m3", "int8", "nvfp4"):
        cases[f"{name} drafts 8"] = {"format": name, "speculative": 7, "lengths": LONG_DRAFTS}
        cases[f"{name} mask"] = {
            "format": name, "speculative": 3, "lengths": DRAFTS, "drafts": "mask",
        }  # fmt: skip
        cases[f"{name} 64"] = {"format": name, "head_dim": 64, "v_head_dim": 64}
        cases[f"{name} 256"] = {"format": name, "head_dim": 256, "v_head_dim": 256, "group": 2}
        cases[f"{name} 1 head"] = {"format": name, "kv_heads": 1, "group": 8}
        cases[f"{name} 2 heads"] = {"format": name, "kv_heads": 2, "group": 4, **WINDOW}
        cases[f"{name} page 64"] = {"format": name, "page_size": 64}
    return {
        name: Case(**{"seed": seed, "lengths": SINGLE, **BF16, **case})
        for seed, (name, case) in enumerate(cases.items())
    }


def drawn(seed: int) -> Iterator[Case]:
    """Random cases that the kernel serves, features combined."""
    rng = random.Random(seed)
    while True:
        dims = rng.choice((64, 96, 128, 256, (192, 128)))
        dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
        dtype = rng.choice((torch.float16, torch.bfloat16))
        plain = "bf16" if dtype == torch.bfloat16 else "fp16"
        fmt = rng.choice((plain, *FORMATS))
        speculative = rng.choice((0, 0, 1, 3, 7))
        count = rng.randint(1, 6)
        lengths = []
        for _ in range(count):
            m = rng.randint(0, 1 + speculative)
            lengths.append((m, rng.choice((m, m + rng.randint(0, 40), rng.randint(m, 1300)))))
        yield Case(
            seed=rng.randrange(1 << 20),
            lengths=tuple(lengths),
            dtype=dtype,
            kv_heads=rng.choice((1, 2, 3, 4, 6, 8, 16)),
            group=rng.choice((1, 2, 3, 4, 7, 8, 12)),
            head_dim=dim,
            v_head_dim=value_dim,
            format=fmt,
            page_size=rng.choice((1, 3, 16, 16, 32, 64)),
            memory=rng.choice(("LBHNC", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "separate", "strided")),
            causal=rng.choice((True, True, False, tuple(rng.random() < 0.5 for _ in lengths))),
            window=rng.choice((None, None, 5, 40, 300)),
            soft_cap=rng.choice((None, None, 2.0, 30.0)),
            alibi=rng.random() < 0.3,
            sinks=rng.random() < 0.3,
            drafts=rng.choice((None, None, "mask", "parents")),
            scales=rng.random() < 0.5,
            speculative=speculative,
            splits=rng.choice((None, None, None, 2, 5)),
            padding=rng.choice((0, 3)),
        )
