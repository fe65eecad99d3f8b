"""R27: after ``attn.warmup()`` no batch within the limits compiles anything."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import pageant
from pageant import Layer
from tests.gpu.scene import SHAPE, attention, random_batch, rows

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.gpu

LIMITS = pageant.Limits(max_requests=8, max_tokens=64, max_seq_len=1024)
POOL = 8 * 64


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels compiled, or taken from Triton's cache on disk, since the test began.

    Triton 3.6's hook after a compilation cannot be used: it writes constants as JSON, and our
    variants are dataclasses. Its listener is told of the same.
    """
    seen = []

    def note(*, src, **_):
        seen.append(src.fn.__name__)

    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    return seen


@triton.jit
def _add(x, number: tl.constexpr):
    tl.store(x, tl.load(x) + number)


def test_compilation_is_seen(compilations):
    x = torch.zeros(1, device="cuda")
    _add[(1,)](x, 3)
    _add[(1,)](x, 3)
    assert compilations == ["_add"]


@pytest.mark.parametrize(
    ("format", "invariant"),
    [("auto", False), ("auto", True), ("fp8_e4m3", False), ("nvfp4", False)],
)
def test_a_thousand_random_batches_compile_nothing(format, invariant, compilations):
    sinks = torch.zeros(SHAPE.num_q_heads, device="cuda")
    layers = (Layer(window=100, sinks=sinks), Layer(window=None, sinks=sinks))
    spec = pageant.CacheSpec(format=format, page_size=16)
    attn = attention(LIMITS, layers, cache=spec, invariant=invariant, speculative_tokens=3)
    kv = attn.new_cache(num_layers=1, num_pages=POOL)[0]
    attn.warmup()
    warm = len(compilations)
    assert warm > 0
    q, new, rng = rows(64, 8, 64), rows(64, 2, 64), np.random.default_rng(27)
    for _ in range(1000):
        step = random_batch(rng, LIMITS, POOL, longest=int(rng.choice([1, 4, 40])))
        plan = attn.plan(step)
        attn.write(plan, kv, new, new)
        for layer in layers:
            attn.run(plan, q[: step.num_tokens], kv, layer, return_lse=bool(rng.integers(2)))
    assert compilations[warm:] == []


FIRST_DECODE = """
import time
import torch
from tests.gpu.scene import SHAPE, attention, batch, noise, rows
import pageant
attn = attention(pageant.Limits(max_requests=8, max_tokens=8, max_seq_len=1024))
kv, q = noise(attn, 64)[0], rows(8, 8, 64)
plan = attn.plan(batch([1] * 8, [100] * 8))
torch.cuda.synchronize()
start = time.perf_counter()
attn.run(plan, q, kv)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_the_first_decode_is_compiled_in_three_seconds(tmp_path, record_property):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_DECODE],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    took = float(done.stdout.split()[-1])
    record_property("first_decode_seconds", round(took, 2))
    assert took < 3
