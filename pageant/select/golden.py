"""The whole policy as text: every device x phase x format x question, refusals included.

``python -m pageant.select.golden > tests/golden/kernels.txt`` accepts a change of policy; what
changed is then a readable diff.
"""

from __future__ import annotations

import sys
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

Answer = tuple[str, str]  # the kernel, or "-"; and the refusals before it, as "kernel:arguments"


def render() -> str:
    """The table: one line a question and group of formats; devices that agree share a part.

    "cpu.decode:sm+lse" says that cpu.decode was refused because of the device and of lse; the
    sentences stand at the end.
    """
    sentences: dict[str, None] = {}
    parts: dict[tuple[Phase, str], list[str]] = {}
    for phase in PHASES:
        for family, device in FAMILIES.items():
            parts.setdefault((phase, _part(device, phase, sentences)), []).append(family)
    tables = [f"{phase}: {' '.join(families)}\n{text}" for (phase, text), families in parts.items()]
    return "\n\n".join((*tables, "\n".join(sorted(sentences)))) + "\n"


def _part(device: Device, phase: Phase, sentences: dict[str, None]) -> str:
    lines = [("question", "formats", "kernel", "refused before")]
    for question, changes in QUESTIONS.items():
        groups: dict[Answer, list[str]] = {}
        for fmt in FORMATS:
            groups.setdefault(_answer(device, phase, fmt, changes, sentences), []).append(fmt)
        for answer, formats in groups.items():
            every = len(formats) == len(FORMATS)
            lines.append((question, "all" if every else " ".join(formats), *answer))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _answer(
    device: Device, phase: Phase, fmt: str, changes: dict[str, Any], sentences: dict[str, None]
) -> Answer:
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes.get("shape", {})}
    options = Options(**changes.get("options", {}))
    needs = needs_of(
        Shape(**shape),
        CacheSpec(format=fmt, **changes.get("cache", {})),
        Features(**changes.get("features", {})),
        options,
        device,
    )
    choice = choose(needs, phase, options.kernels)
    codes = [f"{refusal.kernel}:{'+'.join(refusal.arguments)}" for refusal in choice.refused]
    for code, refusal in zip(codes, choice.refused, strict=True):
        sentences[f"{code}  {refusal.why}"] = None
    return choice.row.name if choice.row else "-", " ".join(codes)


if __name__ == "__main__":
    sys.stdout.write(render())
