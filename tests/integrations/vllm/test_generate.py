"""vLLM on its CPU, with Pageant and with its own attention: the same greedy tokens in float32."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm` has an environment")

from tests.integrations.vllm import models

CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
ROOT = Path(__file__).parents[3]
TIE = 1e-4  # where the two best tokens are closer than this, either may win
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
CHUNKS = {"max_num_batched_tokens": 32, "block_size": 16, "enable_prefix_caching": True}
TOKEN_MAJOR, HEADS_OUTERMOST = ({"VLLM_KV_CACHE_LAYOUT": name} for name in ("LBNHC", "BHLNC"))
# All of it at once: what CI runs.
EVERYTHING = {
    "options": {**CHUNKS, "speculative_config": NGRAMS},
    "rounds": 2,
    "env": TOKEN_MAJOR,
}
# What Pageant is asked to do, beside the same prompts under vLLM's own attention.
JOBS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks and cached prefixes": {"options": CHUNKS, "rounds": 2},
    "speculation": {"options": {"speculative_config": NGRAMS}},
    "pages of 32, token by token": {"options": {"block_size": 32}, "env": TOKEN_MAJOR},
    "pages of 128, heads outermost": {"options": {"block_size": 128}, "env": HEADS_OUTERMOST},
    "layers inside heads": {"env": {"VLLM_KV_CACHE_LAYOUT": "LHBNC"}},
    "layers inside blocks": {"env": {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}},
    "layers inside blocks, token by token": {"env": {"VLLM_KV_CACHE_LAYOUT": "BLNHC"}},
}
QUANTISED = ("fp8", "int8_per_token_head", "nvfp4")
FP8 = ("fp8", "fp8_e5m2")  # those that vLLM's own attention has on CPUs with AVX-512


def answers(*jobs: dict[str, Any]) -> tuple[list[Any], str]:
    """The answers of one process, and its log."""
    command = [sys.executable, "-m", "tests.integrations.vllm.generate", json.dumps(jobs)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), log


@cache
def folder(family: str, root: Path) -> str:
    path = root / family
    models.save(family, path)
    return str(path)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def assert_same(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Tokens are equal, up to where the best two are as good as each other."""
    for answer in (ours, stock):
        assert "refused" not in answer, answer
    assert len(ours["answers"]) == len(stock["answers"]) == 32
    for one, other in zip(ours["answers"], stock["answers"], strict=True):
        if one["tokens"] != other["tokens"]:
            pairs = zip(one["tokens"], other["tokens"], strict=True)
            split = next(i for i, (a, b) in enumerate(pairs) if a != b)
            assert other["margins"][split] < TIE
    forward, update = ours["calls"]["forward"], ours["calls"]["do_kv_cache_update"]
    assert forward >= update > 0, "forward alone runs where vLLM warms up"
    assert set(stock["calls"].values()) == {0}


def test_in_short(root: Path) -> None:
    """Sinks and windows; then chunks, cached prefixes, speculation and token-major pages at once.

    The rest of this file is slow: `make vllm` runs it, CI does not.
    """
    plain, sinks = folder("llama", root), folder("gpt_oss", root)
    found, log = answers(
        {"model": plain, "backend": ""},
        {"model": plain, "backend": "CUSTOM", **EVERYTHING},
        {"model": sinks, "backend": ""},
        {"model": sinks, "backend": "CUSTOM"},
    )
    stock, ours, stock_sinks, our_sinks = found
    assert_same(ours, stock)
    assert_same(our_sinks, stock_sinks)
    assert log.count("Pageant: the first layer runs") == 2
    assert sum(each["cached"] for each in ours["answers"]) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "smollm2"])
def test_families(family: str, root: Path) -> None:
    """Norms of queries; soft caps and windows; one that was trained."""
    model = folder(family, root)
    jobs = ({"model": model, "backend": name} for name in ("CUSTOM", ""))
    (ours, stock), log = answers(*jobs)
    assert_same(ours, stock)
    assert "Pageant: the first layer runs" in log


@pytest.mark.slow
def test_features(root: Path) -> None:
    model = folder("llama", root)
    jobs = [{"model": model, "backend": "CUSTOM", **job} for job in JOBS.values()]
    (stock, *all_ours), _ = answers({"model": model, "backend": ""}, *jobs)
    for name, ours in zip(JOBS, all_ours, strict=True):
        assert_same(ours, stock)
        cached = sum(each["cached"] for each in ours["answers"])
        assert (cached > 1000) == (name == "chunks and cached prefixes")
    strides = {
        name: next(iter(ours["strides"].values()))
        for name, ours in zip(JOBS, all_ours, strict=True)
    }
    for name in ("pages of 32, token by token", "layers inside blocks, token by token"):
        assert strides[name][1] < strides[name][2], "heads lie inside tokens"
    page, head, *_ = strides["pages of 128, heads outermost"]
    assert page > head > 128 * 64, "heads lie outside of layers"
    page, head, *_ = strides["layers inside heads"]
    assert head > page, "pages lie inside heads"
    page, head, row, content = strides["layers inside blocks"]
    assert (head, row, content) == (32 * 64, 64, 1) or head == row * (head // row)
    assert page >= 2 * 2 * head, "layers lie inside pages"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(root: Path) -> None:
    model, options = folder("llama", root), {"options": {"enforce_eager": False}}
    (stock, ours), log = answers(
        *({"model": model, "backend": name, **options} for name in ("", "CUSTOM"))
    )
    assert_same(ours, stock)
    assert "Pageant: the first layer runs" in log


@pytest.mark.slow
def test_quantised_caches(root: Path) -> None:
    """Each runs, in two layouts with the same tokens, and with others than the plain cache."""
    model = folder("llama", root)
    jobs = [
        {
            "model": model,
            "backend": "CUSTOM",
            "prompts": 8,
            "options": {"kv_cache_dtype": name, "block_size": 32},
            "env": {"VLLM_KV_CACHE_LAYOUT": layout},
        }
        for name in QUANTISED
        for layout in ("LBHNC", "BLNHC")
    ]
    found, _ = answers(*jobs)
    tokens = [[each["tokens"] for each in one["answers"]] for one in found]
    for one, other in zip(tokens[::2], tokens[1::2], strict=True):
        assert one == other
    assert tokens[0] != tokens[2] != tokens[4]


@pytest.mark.slow
@pytest.mark.skipif("avx512f" not in CPU, reason="vLLM's own fp8 cache needs AVX-512")
def test_fp8_tokens_are_those_of_vllm_but_for_its_rounding(root: Path) -> None:
    """vLLM's CPU kernel cuts spare bits off where IEEE rounds to nearest, as Pageant does.

    From keys and values whose spare bits are 0 already, both generate the same tokens.
    """
    model = folder("llama", root)
    jobs: list[dict[str, Any]] = []
    for name in FP8:
        job = {"model": model, "options": {"kv_cache_dtype": name, "block_size": 32}}
        jobs += [{**job, "backend": ""}, {**job, "backend": "CUSTOM", "cut": name}]
    (stock, ours, stock_e5m2, ours_e5m2), _ = answers(*jobs)
    assert_same(ours, stock)
    assert_same(ours_e5m2, stock_e5m2)


@pytest.mark.slow
def test_an_encoder(root: Path) -> None:
    """BERT, which caches nothing: the same embeddings."""
    job = {"model": folder("bert", root), "options": {"runner": "pooling"}}
    (stock, ours), log = answers(*({**job, "backend": name} for name in ("", "CUSTOM")))
    assert "refused" not in stock, stock
    assert "refused" not in ours, ours
    one, other = (
        torch.tensor([each["embedding"] for each in found["answers"]]) for found in (ours, stock)
    )
    assert other.std() > 0.01
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert ours["calls"]["forward"] > 0 == stock["calls"]["forward"]
    assert "Pageant: the first layer runs" in log


@pytest.mark.slow
def test_host_time(root: Path, record_property: Callable[[str, object], None]) -> None:
    """Of `build` in one run, for 64 decodes a step: vLLM's, whose planning is C++, and ours."""
    model, options = folder("llama", root), {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    job = {"model": model, "prompts": 64, "options": options}
    found, _ = answers(*({**job, "backend": name} for name in ("", "CUSTOM", "", "CUSTOM")))
    theirs, ours = (min(one["build_us"] for one in found[first::2]) for first in (0, 1))
    print(f"build: vLLM {theirs:.0f} us, Pageant {ours:.0f} us")
    record_property("build_us", {"vllm": theirs, "pageant": ours})
    assert ours < 3 * theirs


@pytest.mark.slow
def test_the_stock_platform_ignores_the_flag_and_we_say_so(root: Path) -> None:
    model = folder("llama", root)
    environment = {"VLLM_TARGET_DEVICE": "cpu"}
    os.environ.update(environment)
    try:
        (found,), log = answers({"model": model, "backend": "CUSTOM", "prompts": 1})
    finally:
        for name in environment:
            del os.environ[name]
    assert found["calls"]["forward"] == 0
    assert "did not take" in log
