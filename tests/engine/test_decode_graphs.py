"""Steps of decodes through buckets give the tokens that steps without them give.

There is no GPU here: the CPU passes for one, kernels are interpreted, and a graph is its step run
again. (tests/gpu/test_engine.py captures.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pageant.device import Device
from pageant.engine import runner
from pageant.engine.config import EngineConfig
from pageant.engine.decode_graphs import DecodeGraphs
from pageant.engine.engine import Engine
from pageant.engine.errors import EngineError
from pageant.engine.request import Sampling
from pageant.engine.runner import put
from pageant.graphs import Graph, buckets
from pageant.graphs.graph import bucket_of, memory_of
from pageant.plan import device_groups
from tests.engine.random_llama import TINY, Numbers, llama

PROMPTS = [[5, 6, 7, 5, 6], [8], [1, 2, 3, 4, 1, 2, 3, 4, 1], [30] * 4, [40, 41]]


class Again:
    def __init__(self, step: Any) -> None:
        self.replay = step


def captured(attn: Any, fn: Any, *, tokens: int, **kind: Any) -> Graph:
    """What ``capture`` makes, but for the CUDA graph: its step is run instead."""
    bucket = bucket_of(attn, tokens, None, **kind)
    memory = memory_of(attn)
    batch, step = memory.open(bucket, fn)
    return Graph(bucket, step(), batch, memory, Again(step))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU passes for an A100 of one multiprocessor."""
    device = replace(Device.of("sm80"), num_sms=1)
    monkeypatch.setattr(Device, "detect", lambda _device: device)
    monkeypatch.setattr(buckets, "check_capturable", lambda _attn: None)
    monkeypatch.setattr(buckets, "capture", captured)
    with np.errstate(all="ignore"):
        yield monkeypatch


@pytest.mark.parametrize(("drafts", "chunk"), [(0, 4), (2, 4), (2, 2)])
def test_the_same_tokens(pretend: pytest.MonkeyPatch, drafts: int, chunk: int) -> None:
    """Five requests in a bucket of eight, fewer towards the end; chunks that are decodes too."""
    sampling, config = Sampling(max_new_tokens=5), EngineConfig(speculative_tokens=drafts)
    config = replace(config, num_pages=40, max_requests=8, chunk_size=chunk)
    engine = Engine(llama(TINY), Numbers(), config)
    runner, sizes = engine._runner, []
    graphs = DecodeGraphs(runner.attention, runner._forward)
    runner.graphs = graphs
    run = graphs.run

    def noted(batch: Any, *rows: torch.Tensor) -> torch.Tensor:
        sizes.append(batch.num_tokens)
        return run(batch, *rows)

    pretend.setattr(graphs, "run", noted)
    got = [completion.tokens for completion in engine.generate(PROMPTS, sampling)]
    assert len(sizes) >= 3
    assert set(sizes) - set(graphs._graphs.sizes), "no bucket was padded"
    pretend.undo()
    want = Engine(llama(TINY), Numbers(), config).generate(PROMPTS, sampling)
    assert got == [completion.tokens for completion in want]
    assert len({tuple(tokens) for tokens in got}) > 1


def test_prompts_that_begin_alike(pretend: pytest.MonkeyPatch) -> None:
    """Their steps look for shared keys, and give the tokens of steps that do not."""
    pretend.setattr(runner, "SHARED_TOKENS", 16)
    pretend.setattr(device_groups, "LEAST_SHARED", 16)
    prompts = [[*range(1, 40), end] for end in (3, 4, 5)]
    sampling, config = Sampling(max_new_tokens=4), EngineConfig(num_pages=40, max_requests=4)
    engine = Engine(llama(TINY), Numbers(), config)
    graphs = DecodeGraphs(engine._runner.attention, engine._runner._forward)
    engine._runner.graphs = graphs
    got = [completion.tokens for completion in engine.generate(prompts, sampling)]
    assert graphs._sharing is not None
    assert set(graphs._sharing._graphs) == {4}
    pretend.undo()
    want = Engine(llama(TINY), Numbers(), config).generate(prompts, sampling)
    assert got == [completion.tokens for completion in want]


def test_only_decodes_are_taken(pretend: pytest.MonkeyPatch) -> None:
    engine = Engine(llama(TINY), Numbers(), EngineConfig(num_pages=40, max_requests=4))
    graphs = DecodeGraphs(engine._runner.attention, engine._runner._forward)
    pretend.setattr(graphs, "run", lambda *_: pytest.fail("a prefill went to the graphs"))
    engine._runner.graphs = graphs
    engine.add_request([3, 4, 5], Sampling(max_new_tokens=1))
    engine.step()


def test_a_model_that_cannot_be_captured_says_how_to_do_without(
    pretend: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    pretend.setattr(buckets, "capture", fails)
    engine = Engine(llama(TINY), Numbers(), EngineConfig(num_pages=40))
    engine._runner.graphs = DecodeGraphs(engine._runner.attention, engine._runner._forward)
    with pytest.raises(EngineError, match=r"capturing; to run without .*--no-graphs") as caught:
        engine.generate([[3]], Sampling(max_new_tokens=2))
    assert "\n" not in str(caught.value)


def test_kernels_that_cannot_be_captured_say_how_to_do_without() -> None:
    engine = Engine(llama(TINY), Numbers(), EngineConfig(num_pages=40))
    assert engine._runner.graphs is None
    with pytest.raises(EngineError, match=r"attn.device is 'cpu'.*--no-graphs"):
        DecodeGraphs(engine._runner.attention, engine._runner._forward)


def test_graphs_are_on_or_off() -> None:
    with pytest.raises(EngineError, match="graphs is 1; allowed: True or False"):
        EngineConfig(graphs=1)  # type: ignore[arg-type]


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(3)
    assert put(array, torch.device("cpu")).data_ptr() == array.ctypes.data
