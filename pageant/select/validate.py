"""Everything that is wrong with a configuration on any device, found before a kernel is chosen.

>>> check_config(Shape(num_q_heads=12, num_kv_heads=8, head_dim=64)).reason
'num_q_heads is 12; allowed: a positive multiple of num_kv_heads (8)'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch

from pageant.cache.formats import OF_DTYPE, resolve
from pageant.cache.layout import LAYOUTS
from pageant.select.rows import EVERY_HEAD_DIM, KERNELS, NAMES, OWNERS
from pageant.types import (
    ArgumentError,
    CacheSpec,
    ContextParallel,
    Features,
    Limits,
    Options,
    OutFormat,
    Shape,
    Support,
)

OUT_FORMATS: tuple[str, ...] = get_args(OutFormat)
COMMS = ("ag_rs", "a2a")
HEAD_DIMS = (
    f"a multiple of {EVERY_HEAD_DIM.step} from {EVERY_HEAD_DIM.first} to {EVERY_HEAD_DIM.last}"
)
FROM_ONE = "a whole number from 1 up"


def check_config(
    shape: Shape,
    cache: CacheSpec | None = None,
    features: Features | None = None,
    options: Options | None = None,
) -> Support:
    """Whether a configuration makes sense; the first thing that does not, otherwise.

    Args:
        shape, cache, features, options: as for ``Attention``, not yet trusted in any way.
    """
    cache, features, options = cache or CacheSpec(), features or Features(), options or Options()
    parts: tuple[tuple[str, Any, type, Callable[[Any], None]], ...] = (
        ("shape", shape, Shape, _check_shape),
        ("cache", cache, CacheSpec, _check_cache),
        ("features", features, Features, _check_features),
        ("options", options, Options, _check_options),
    )

    def check() -> None:
        for name, value, kind, check_part in parts:
            _require(isinstance(value, kind), name, value, f"a pageant.{kind.__name__}")
            check_part(value)
        resolve(cache.format, shape.dtype)

    return _verdict(check)


def check_limits(limits: Limits) -> Support:
    """Whether the bounds of batches make sense.

    >>> check_limits(Limits(max_tokens=0)).reason
    'max_tokens is 0; allowed: a whole number from 1 up'
    """

    def check() -> None:
        for name in ("max_requests", "max_tokens", "max_seq_len"):
            _require(_is_whole(getattr(limits, name), 1), name, getattr(limits, name), FROM_ONE)
        total = limits.max_cached_tokens
        ok = total is None or _is_whole(total, 1)
        _require(ok, "max_cached_tokens", total, f"None, or {FROM_ONE}")

    return _verdict(check)


def _verdict(check: Callable[[], None]) -> Support:
    """The answer of a check that raises ArgumentError; any other exception is a bug."""
    try:
        check()
    except ArgumentError as error:
        return Support(False, str(error), error.argument)
    return Support(True)


def _check_shape(shape: Shape) -> None:
    dtypes = ", ".join(map(str, OF_DTYPE))
    is_dtype = isinstance(shape.dtype, torch.dtype) and shape.dtype in OF_DTYPE
    _require(is_dtype, "dtype", shape.dtype, dtypes)
    _require(_is_head_dim(shape.head_dim), "head_dim", shape.head_dim, HEAD_DIMS)
    v_head_dim = shape.v_head_dim
    ok = v_head_dim is None or _is_head_dim(v_head_dim)
    _require(ok, "v_head_dim", v_head_dim, f"None, or {HEAD_DIMS}", "head_dim")
    kv_heads, q_heads = shape.num_kv_heads, shape.num_q_heads
    _require(_is_whole(kv_heads, 1), "num_kv_heads", kv_heads, FROM_ONE, "q_heads")
    ok = _is_whole(q_heads, 1) and q_heads % kv_heads == 0
    multiple = f"a positive multiple of num_kv_heads ({kv_heads})"
    _require(ok, "num_q_heads", q_heads, multiple, "q_heads")


def _check_cache(cache: CacheSpec) -> None:
    _require(isinstance(cache.format, str), "cache", cache.format, "the name of a format")
    _require(_is_whole(cache.page_size, 1), "page_size", cache.page_size, FROM_ONE)
    _require(_is_in(cache.layout, LAYOUTS), "layout", cache.layout, ", ".join(LAYOUTS))


def _check_features(features: Features) -> None:
    windows = features.windows
    ok = isinstance(windows, tuple | list) and len(windows) > 0
    ok = ok and all(window is None or _is_whole(window, 1) for window in windows)
    allowed = "one or more of None and whole numbers from 1 up, in a tuple"
    _require(ok, "windows", windows, allowed, "window")
    _require_flags(features, ("soft_cap", "sinks", "alibi", "draft_masks", "non_causal", "lse"))
    formats = features.out_formats
    ok = isinstance(formats, tuple | list) and len(formats) > 0
    ok = ok and all(_is_in(name, OUT_FORMATS) for name in formats)
    _require(ok, "out_formats", formats, f"one or more of {', '.join(OUT_FORMATS)}, in a tuple")


def _check_options(options: Options) -> None:
    ok = _is_in(options.kernels, (*OWNERS, *NAMES))
    _require(ok, "kernels", options.kernels, KERNELS)
    spec = options.speculative_tokens
    _require(_is_whole(spec, 0), "speculative_tokens", spec, "a whole number from 0 up", "spec")
    slots, splits = options.plan_slots, options.debug_splits
    _require(_is_whole(slots, 1), "plan_slots", slots, FROM_ONE)
    ok = splits is None or _is_whole(splits, 1)
    _require(ok, "debug_splits", splits, f"None, or {FROM_ONE}")
    table = options.table_kernels
    ok = table is None or isinstance(table, bool)
    _require(ok, "table_kernels", table, "None, True or False")
    _require_flags(options, ("invariant", "adaptive", "non_causal_drafts", "validate"))
    _require_flags(options, ("quantize_query",), "q_quant")
    if options.context_parallel is not None:
        _check_ranks(options.context_parallel)


def _check_ranks(ranks: ContextParallel) -> None:
    kind = isinstance(ranks, ContextParallel)
    _require(kind, "context_parallel", ranks, "None, or a pageant.ContextParallel", "dcp")
    world, rank = ranks.world, ranks.rank
    _require(_is_whole(world, 1), "world", world, FROM_ONE, "dcp")
    ok = _is_whole(rank, 0) and rank < world
    _require(ok, "rank", rank, f"a whole number from 0 to {world - 1}", "dcp")
    _require(_is_whole(ranks.interleave, 1), "interleave", ranks.interleave, FROM_ONE, "dcp")
    _require(_is_in(ranks.comm, COMMS), "comm", ranks.comm, ", ".join(COMMS), "dcp")


def _require_flags(owner: object, names: Iterable[str], argument: str | None = None) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(isinstance(value, bool), name, value, "True or False", argument)


def _require(ok: bool, name: str, value: object, allowed: str, argument: str | None = None) -> None:
    """Raise unless `ok`; `argument` is what the error names where fields and options differ."""
    if not ok:
        raise ArgumentError(f"{name} is {value!r}; allowed: {allowed}", argument or name)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_head_dim(value: Any) -> bool:
    return not isinstance(value, bool) and value in EVERY_HEAD_DIM


def _is_in(name: Any, names: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name in names
