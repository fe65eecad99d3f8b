"""What the Gluon decode hands on to the portable kernel, interpreted: equal to the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pageant.device import Device
from pageant.kernels.gluon.common.replan import Replanned
from pageant.plan import device_groups
from tests.inputs import Case, build
from tests.switched_on import gluon_decode

FEW_SHARES = replace(Device.of("sm90"), num_sms=2)
BASE = Case(
    seed=3,
    lengths=((1, 70), (2, 150), (0, 9), (1, 1)),
    dtype=torch.float16,
    kv_heads=2,
    group=3,
    head_dim=64,
    v_head_dim=64,
    page_size=16,
    speculative=1,
    sinks=True,
)


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for a Hopper of two multiprocessors, and groups of any size are found."""
    monkeypatch.setattr(Device, "detect", lambda _device: FEW_SHARES)
    monkeypatch.setattr(device_groups, "LEAST_SHARED", 4)
    with gluon_decode():
        yield


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "strided", "format": "fp8_e4m3"},
        {"memory": "separate", "format": "nvfp4", "window": 50},
        {"memory": "strided", "format": "int8", "drafts": "mask"},
        {"format": "nvfp4", "swizzled": True},
        {"format": "fp8_e4m3_token_head", "kv_heads": 1},
    ],
)
def test_caches_that_no_copy_can_read(changes: dict[str, Any]) -> None:
    problem = build(replace(BASE, **changes))
    assert problem.attn.explain().rows["decode"].tiles == "hopper"
    problem.check()
    problem.check()
    (known,) = problem.attn._calls.known.values() or [None]
    assert any(isinstance(ready, Replanned) for ready in known.kept.values())


def test_shared_prefixes() -> None:
    lengths = ((1, 160), (2, 200), (1, 151), (1, 160), (1, 190))
    case = replace(BASE, lengths=lengths, prefixes=((0, 148),) * 5, page_size=4, format="fp16")
    problem = build(case)
    hint = torch.zeros_like(problem.batch.seq_lens)
    problem = replace(problem, batch=replace(problem.batch, shared_prefix_lens=hint))
    problem.check()
    problem.check()
    groups = problem.attn._planner.slots[0].shared[None]
    assert groups.skips[:5].tolist() == [128] * 5
