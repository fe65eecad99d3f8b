"""The engine on a GPU: the tokens of the CPU in float32, with CUDA graphs and without."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from pageant.engine import smollm2
from pageant.engine.config import EngineConfig
from pageant.engine.engine import Engine
from pageant.engine.generate import chat_tokens
from pageant.engine.model import DEFAULT_MODEL, find
from pageant.engine.prompts import DEMO_PROMPTS
from pageant.engine.request import Sampling
from pageant.engine.runner import put
from pageant.types import CacheSpec
from tests.engine.random_llama import SMOLLM2_135M, Numbers, llama

pytestmark = pytest.mark.gpu

TIE = 1e-4
NEW_TOKENS = 32
# Chunks, a prompt of one token, a shared prefix, and one that repeats itself for the drafts.
LONG = [7 * i % 4099 for i in range(300)]
PROMPTS = [LONG, [11], [*LONG[:64], 5], [3, 1, 4, 1, 5] * 6, LONG[100:117]]


def has_default_model():
    try:
        importlib.metadata.distribution(smollm2.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def model():
    return llama(SMOLLM2_135M)


@pytest.fixture(scope="module")
def expected(model):
    """The CPU engine's tokens; then the model's place is on the GPU."""
    completions = Engine(model, Numbers()).generate(PROMPTS, Sampling(max_new_tokens=NEW_TOKENS))
    model.cuda()
    return [completion.tokens for completion in completions]


@pytest.fixture(scope="module")
def plain():
    """The same model, still on the CPU, with transformers' own attention."""
    return llama(SMOLLM2_135M)


def check(plain, prompt, tokens, expected):
    """Fail unless the tokens are equal, or part where the top two logits do."""
    pairs = zip(tokens, expected, strict=False)
    split = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if split is None:
        assert len(tokens) == len(expected)
        return
    with torch.inference_mode():
        logits = plain(torch.tensor([prompt + expected[:split]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert best - second < TIE, f"token {split} of {len(prompt)}: {tokens[split]}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"graphs": False},
        {"speculative_tokens": 3},
        {"chunk_size": 2, "cache": CacheSpec(page_size=5)},
        {"max_requests": 3, "prefix_cache": False},
    ],
    ids=str,
)
def test_the_tokens_of_the_cpu(model, expected, plain, changes):
    engine = Engine(model, Numbers(), EngineConfig(**changes))
    completions = engine.generate(PROMPTS, Sampling(max_new_tokens=NEW_TOKENS))
    for prompt, completion, want in zip(PROMPTS, completions, expected, strict=True):
        check(plain, prompt, completion.tokens, want)
    graphs = engine._runner.graphs
    if changes.get("graphs", True):
        assert graphs is not None
        assert graphs._graphs._graphs, "no step went through a graph"
    else:
        assert graphs is None


@pytest.mark.parametrize("graphs", [True, False])
def test_prompts_that_begin_alike(model, expected, plain, graphs):
    prompts = [[*LONG, number] for number in range(5)]
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    engine = Engine(model, Numbers(), EngineConfig(graphs=graphs))
    completions = engine.generate(prompts, sampling)
    if graphs:
        assert engine._runner.graphs._sharing._graphs, "no step shared keys"
    unshared = Engine(llama(SMOLLM2_135M), Numbers(), EngineConfig(prefix_cache=False))
    alone = unshared.generate(prompts, sampling)
    for prompt, completion, want in zip(prompts, completions, alone, strict=True):
        check(plain, prompt, completion.tokens, want.tokens)


@pytest.mark.skipif(not has_default_model(), reason=f"{smollm2.PACKAGE} is not installed")
def test_the_demos_text(record_property):
    """What `pageant generate` prints when it is given no prompt, in float32."""
    found = find(DEFAULT_MODEL, quiet=True)
    prompts = chat_tokens(found.tokenizer, DEMO_PROMPTS)
    completions = []
    for device in ("cpu", "cuda"):
        engine = Engine(*found.load(torch.float32, torch.device(device)))
        completions.append(engine.generate(prompts, Sampling(max_new_tokens=NEW_TOKENS)))
    plain = found.load(torch.float32, torch.device("cpu")).model
    for prompt, expected, completion in zip(prompts, *completions, strict=True):
        check(plain, prompt, completion.tokens, expected.tokens)
    same = sum(one.text == other.text for one, other in zip(*completions, strict=True))
    record_property("equal_texts", f"{same} of {len(prompts)}")


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_in_bfloat16(cache):
    """What `pageant generate --device cuda` runs by default. Rounding may part some texts:
    the first token comes from a prefill, the second from a graph or an eager step."""
    model = llama({**SMOLLM2_135M, "num_hidden_layers": 3}).to("cuda", torch.bfloat16)
    texts = []
    for graphs in (True, False):
        config = EngineConfig(cache=CacheSpec(format=cache), graphs=graphs)
        engine = Engine(model, Numbers(), config)
        completions = engine.generate(PROMPTS, Sampling(max_new_tokens=8))
        texts.append([completion.tokens[:2] for completion in completions])
        assert all(len(completion.tokens) == 8 for completion in completions)
    agreeing = sum(one == other for one, other in zip(*texts, strict=True))
    assert agreeing >= 3, texts


def test_copies_wait_for_nothing():
    """Many copies behind a stalled stream, from memory that is given back at once."""
    device = torch.device("cuda", 0)
    kept = [torch.empty(1000, dtype=torch.int64).pin_memory() for _ in range(120)]
    del kept  # torch keeps the memory, so that none is made behind the stalled stream
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    copies = [put(np.full(1000, number), device) for number in range(100)]
    assert not torch.cuda.current_stream().query(), "the device was not stalled"
    for number, copy in enumerate(copies):
        assert (copy == number).all()
