"""Attention by the provider on the CPU: FlashInfer's stand-in computes what FlashInfer would.

Every call is first bound to FlashInfer's own signature.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pageant
import pageant.integrations.flashinfer as stand_in
from pageant.device import FAMILIES
from pageant.kernels.cpu.write_pages import write_pages
from pageant.kernels.vendor.flashinfer_native import SINK_MODULES
from tests.inputs import Problem
from tests.kernels.vendor.signatures import folder, read, recorded, signature

CLASSES = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchAttentionWithAttentionSinkWrapper",
)
FUNCTIONS = {
    "decode": ("trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"),
    "prefill": ("trtllm_batch_context_with_kv_cache",),
    "utils": ("FP4Tensor",),
}


class Calls(list[str]):
    """Names of what was called, in order."""

    def __init__(self) -> None:
        super().__init__()
        root = folder()
        self.known = recorded() if root is None else read(root)

    def bind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError unless FlashInfer could be called like this."""
        self.append(name)
        signature(self.known, name).bind(*args, **kwargs)

    def wrapper(self, name: str) -> type:
        """A wrapper of the stand-in whose calls are bound."""
        calls, base = self, getattr(stand_in, name)

        class Bound(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                calls.bind(f"{name}.__init__", args, kwargs)
                super().__init__(*args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                calls.bind(f"{name}.plan", args, kwargs)
                super().plan(*args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                calls.bind(f"{name}.run", args, kwargs)
                return super().run(*args, **kwargs)

        return Bound

    def function(self, module: str, name: str) -> Any:
        """A function of the stand-in whose calls are bound, or a class whose making is."""
        inner = getattr(getattr(stand_in, module), name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.bind(f"{name}.__init__" if isinstance(inner, type) else name, args, kwargs)
            return inner(*args, **kwargs)

        return call


@contextmanager
def flashinfer() -> Iterator[Calls]:
    """The stand-in in FlashInfer's place, and what is called of it."""
    calls = Calls()
    modules = {"flashinfer": types.ModuleType("flashinfer")}
    for name in CLASSES:
        setattr(modules["flashinfer"], name, calls.wrapper(name))
    for part, names in FUNCTIONS.items():
        module = modules[f"flashinfer.{part}"] = types.ModuleType(f"flashinfer.{part}")
        for name in names:
            setattr(module, name, calls.function(part, name))
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:  # not patch.dict, which would forget whatever else is imported meanwhile
        with patch.dict(SINK_MODULES):
            yield calls
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def attention(mine: pageant.Attention, family: str, **options: Any) -> pageant.Attention:
    """The same Attention by FlashInfer's rows for a family of GPUs, on the CPU."""
    with (
        patch("pageant.api.Device.detect", lambda _: FAMILIES[family]),
        patch("pageant.select.built.is_installed", lambda _: True),
        patch("pageant.api.load_stores", lambda _: (_write, None)),
        patch("pageant.plan.host_plan.ROOM_BYTES", 1 << 24),
        patch("pageant.plan.host_plan.INVARIANT_ROOM_BYTES", 1 << 24),
    ):
        return pageant.Attention(
            mine.shape,
            mine.cache,
            mine.limits,
            mine.features,
            replace(mine.options, **{"kernels": "flashinfer", **options}),
            mine.device,
        )


def _write(k: Any, v: Any, cache: Any, writes: Any, scales: Any, kept: Any) -> None:
    from pageant.plan.pages import write_index

    write_pages(k, v, cache, write_index(writes.slots, cache.page_size), scales)


def by_flashinfer(problem: Problem, family: str, **options: Any) -> Problem:
    """The same problem for a family's FlashInfer kernels."""
    return replace(problem, attn=attention(problem.attn, family, **options))
