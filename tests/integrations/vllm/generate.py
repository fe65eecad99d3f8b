"""Greedy tokens of vLLM for many prompts, as JSON on the last line: run by tests in a process.

    python -m tests.integrations.vllm.generate '[{"model": FOLDER, "backend": "CUSTOM"}, ...]'

Jobs may have "options" of vllm.LLM, "env", "prompts", "rounds" and "cut"; backend "" is vLLM's own
choice. With "cut", Pageant is given keys and values whose spare bits are 0, for that type of cache.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import traceback
from typing import Any

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "seed": 0,
    "disable_log_stats": True,
}
NEW_TOKENS = 32


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 120 tokens: every fourth begins with the same 70, others repeat a phrase."""
    rng = random.Random(3)
    common = [rng.randrange(3, 256) for _ in range(70)]
    texts = []
    for index in range(count):
        text = [rng.randrange(3, 256) for _ in range(rng.choice([1, 2, 7, 31, 32, 33, 64, 100]))]
        if index % 4 == 0:
            text = common + text[:50]
        if index % 4 == 1:
            text = (text[:12] * 5)[:50]
        texts.append(text)
    return texts


def answers(llm: Any, count: int, rounds: int) -> list[dict[str, Any]]:
    """Each prompt's tokens, the margin of each over the next best, and its cached tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    texts = [{"prompt_token_ids": text} for text in prompts(count)]
    for _ in range(rounds):  # the second time from cached prefixes
        outputs = llm.generate(texts, sampling, use_tqdm=False)
    found = []
    for output in outputs:
        steps = output.outputs[0]
        tops = [
            sorted((each.logprob for each in top.values()), reverse=True) for top in steps.logprobs
        ]
        found.append(
            {
                "tokens": list(steps.token_ids),
                "margins": [top[0] - top[1] if len(top) > 1 else 99.0 for top in tops],
                "cached": output.num_cached_tokens,
            }
        )
    return found


def embeddings(llm: Any, count: int) -> list[dict[str, Any]]:
    """What an encoder says of each prompt."""
    texts = [{"prompt_token_ids": text} for text in prompts(count)]
    found = llm.embed(texts, use_tqdm=False)
    return [{"embedding": output.outputs.embedding} for output in found]


def cut(x: Any, kind: str) -> Any:
    """Round towards zero to what the type holds, as vLLM's CPU kernel does when it stores."""
    import torch

    bits, least = {"fp8": (3, -6), "fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}[kind]
    exponent = (torch.frexp(x).exponent - 1).clamp(min=least)
    step = torch.ldexp(torch.ones_like(x), exponent - bits)
    return torch.trunc(x / step) * step


def timed(job: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Requests, tokens and microseconds of every step's `build` from now on."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    from pageant.integrations.vllm.builder import PageantBuilder

    builder: Any = PageantBuilder if job["backend"] else CPUAttentionMetadataBuilder
    build, steps = builder.build, []

    def timed_build(*args: Any, **others: Any) -> Any:
        begin = time.perf_counter()
        made = build(*args, **others)
        took = (time.perf_counter() - begin) * 1e6
        common = others["common_attn_metadata"] if "common_attn_metadata" in others else args[2]
        steps.append((common.num_reqs, common.num_actual_tokens, took))
        return made

    builder.build = timed_build
    return steps


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine's answers, and how often our layers ran; or what it refused, and where."""
    from vllm import LLM

    from pageant.integrations.vllm.impl import PageantImpl

    calls = {"forward": 0, "do_kv_cache_update": 0}
    if "cut" in job:
        store = PageantImpl.do_kv_cache_update
        PageantImpl.do_kv_cache_update = lambda self, layer, key, value, *others: store(
            self, layer, cut(key, job["cut"]), cut(value, job["cut"]), *others
        )
    steps = timed(job)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in calls:
        setattr(PageantImpl, name, counted(name, getattr(PageantImpl, name)))
    os.environ.update(job.get("env", {}))
    backend = {"attention_backend": job["backend"]} if job["backend"] else {}
    try:
        llm = LLM(model=job["model"], **DEFAULTS | backend | job.get("options", {}))
        if "runner" in job.get("options", {}):
            found = embeddings(llm, job.get("prompts", 32))
        else:
            found = answers(llm, job.get("prompts", 32), job.get("rounds", 1))
    except Exception as error:  # noqa: BLE001 - whatever vLLM refuses with is the answer
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"refused": str(error)[:500], "where": f"{where.filename}:{where.lineno}"}
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    strides = {name: list(kv.stride()) for name, kv in caches.items() if kv is not None}
    count = job.get("prompts", 32)
    decodes = [took for requests, tokens, took in steps if requests == tokens == count]
    micros = statistics.median(decodes) if decodes else None
    return {"answers": found, "calls": calls, "strides": strides, "build_us": micros}


def main() -> None:
    """Run the jobs one after another, each in a fork: one process serves one CPU engine."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM  # noqa: F401  # once, for all of them

    if "VLLM_TARGET_DEVICE" not in os.environ:  # vLLM's own platform does not start after numba
        import pageant.kernels.cpu.attention  # noqa: F401

    results = []
    for job in json.loads(sys.argv[1]):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(run(job), pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            results.append(
                json.loads(pipe.read() or '{"refused": "the process died", "where": ""}')
            )
        os.wait()
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
