"""The whole policy as text: every device x phase x format x question, refusals included.

``python -m pageant.select.golden > tests/golden/kernels.txt`` accepts a change of policy; what
changed is then a readable diff.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES, Device
from pageant.select.choose import choose
from pageant.select.needs import needs_of
from pageant.select.rows import PHASES, Phase
from pageant.types import CacheSpec, ContextParallel, Features, Options, Shape

# Each question changes a plain one (bfloat16, 32 and 8 heads of 128, pages of 16, "auto").
QUESTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32 model": {"shape": {"dtype": torch.float32}},
    "fp16 model": {"shape": {"dtype": torch.float16}},
    "head 512": {"shape": {"head_dim": 512}},
    "head 192/128": {"shape": {"head_dim": 192, "v_head_dim": 128}},
    "page 1": {"cache": {"page_size": 1}},
    "page 528": {"cache": {"page_size": 528}},
    "layout BHLNC": {"cache": {"layout": "BHLNC"}},
    "window": {"features": {"windows": (128, None)}},
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
    "2 ranks": {"options": {"context_parallel": ContextParallel(rank=0, world=2)}},
    "=pageant": {"options": {"kernels": "pageant"}},
    "=reference": {"options": {"kernels": "reference"}},
    "=flashinfer": {"options": {"kernels": "flashinfer"}},
}


def render() -> str:
    """The table. Devices that agree in every cell share one.

    A cell names the kernel, or "-" for none, and by number the refusals that came before it.
    """
    notes: dict[str, int] = {}
    tables: dict[tuple[Phase, str], list[str]] = {}
    for phase in PHASES:
        for family, device in FAMILIES.items():
            tables.setdefault((phase, _table(device, phase, notes)), []).append(family)
    parts = [f"{phase}: {', '.join(families)}\n{table}" for (phase, table), families in tables.items()]
    parts.append("\n".join(f"[{number}] {note}" for note, number in notes.items()))
    return "\n\n".join(parts) + "\n"


def _table(device: Device, phase: Phase, notes: dict[str, int]) -> str:
    lines = [["", *FORMATS]]
    for name, changes in QUESTIONS.items():
        lines.append([name, *(_cell(device, phase, fmt, changes, notes) for fmt in FORMATS)])
    return "\n".join(_aligned(lines))


def _cell(
    device: Device, phase: Phase, fmt: str, changes: dict[str, Any], notes: dict[str, int]
) -> str:
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes.get("shape", {})}
    options = Options(**changes.get("options", {}))
    needs = needs_of(
        Shape(**shape),
        CacheSpec(**{"format": fmt, **changes.get("cache", {})}),
        Features(**changes.get("features", {})),
        options,
        device,
    )
    choice = choose(needs, phase, options.kernels)
    refused = [f"{refusal.kernel} {refusal.why}" for refusal in choice.refused]
    numbers = [str(notes.setdefault(note, len(notes) + 1)) for note in refused]
    name = choice.row.name if choice.row else "-"
    return f"{name} [{' '.join(numbers)}]" if numbers else name


def _aligned(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


if __name__ == "__main__":
    sys.stdout.write(render())
