"""vLLM on its CPU, with Pageant and with its own attention: the same greedy tokens in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm` has an environment")

from tests.integrations.vllm import models

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
TIE = 1e-4  # where the two best tokens are closer than this, either may win
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
CHUNKS = {"max_num_batched_tokens": 32, "block_size": 16, "enable_prefix_caching": True}
# What Pageant is asked to do, beside the same prompts under vLLM's own attention.
JOBS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks and cached prefixes": {"options": CHUNKS, "rounds": 2},
    "speculation": {"options": {"speculative_config": NGRAMS}},
    "pages of 32, token by token": {
        "options": {"block_size": 32},
        "env": {"VLLM_KV_CACHE_LAYOUT": "LBNHC"},
    },
    "pages of 128, heads outermost": {
        "options": {"block_size": 128},
        "env": {"VLLM_KV_CACHE_LAYOUT": "BHLNC"},
    },
}
QUANTISED = ("fp8", "int8_per_token_head", "nvfp4")


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
    assert ours["calls"]["forward"] == ours["calls"]["do_kv_cache_update"] > 0
    assert set(stock["calls"].values()) == {0}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_families(family: str, root: Path) -> None:
    """Norms of queries; soft caps and windows; sinks and windows."""
    model = folder(family, root)
    jobs = ({"model": model, "backend": name} for name in ("CUSTOM", ""))
    (ours, stock), log = answers(*jobs)
    assert_same(ours, stock)
    assert "Pageant: the first layer runs" in log


def test_features(root: Path) -> None:
    model = folder("llama", root)
    jobs = [{"model": model, "backend": "CUSTOM", **job} for job in JOBS.values()]
    (stock, *all_ours), _ = answers({"model": model, "backend": ""}, *jobs)
    for name, ours in zip(JOBS, all_ours, strict=True):
        assert_same(ours, stock)
        cached = sum(each["cached"] for each in ours["answers"])
        assert (cached > 1000) == (name == "chunks and cached prefixes")
    strides = [next(iter(ours["strides"].values())) for ours in all_ours]
    assert strides[3][1] < strides[3][2], "heads lie inside tokens"
    assert strides[4][0] > strides[4][1] > 128 * 64, "heads lie outside of layers"


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
