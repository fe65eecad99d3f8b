"""Everything that is wrong with a configuration on any device, found before a kernel is chosen.

>>> check_config(Shape(num_q_heads=12, num_kv_heads=8, head_dim=64)).reason
'num_q_heads is 12; allowed: a positive multiple of num_kv_heads (8)'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
import torch.distributed as dist

from pageant.cache.formats import FORMATS, OF_DTYPE, Format, resolve
from pageant.cache.layout import LAYOUTS
from pageant.ranks import ContextParallel
from pageant.select.bounds import LARGEST, is_whole, whole
from pageant.select.rows import EVERY_HEAD_DIM, KERNELS, NAMES, OWNERS
from pageant.types import (
    ArgumentError,
    CacheSpec,
    Features,
    Limits,
    Options,
    OutFormat,
    Shape,
    Support,
)

OUT_FORMATS: tuple[str, ...] = get_args(OutFormat)
COMMS = ("ag_rs", "a2a")
HEADS = ("all", "split")
HEAD_DIMS = (
    f"a multiple of {EVERY_HEAD_DIM.step} from {EVERY_HEAD_DIM.first} to {EVERY_HEAD_DIM.last}"
)


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
    cache = CacheSpec() if cache is None else cache
    features = Features() if features is None else features
    options = Options() if options is None else options
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
        _check_scale_order(resolve(cache.format, shape.dtype), shape, cache)
        _check_out_blocks(shape, features)
        _check_parts(features, options)

    return _verdict(check)


def check_limits(limits: Limits) -> Support:
    """Whether the bounds of batches make sense.

    >>> check_limits(Limits(max_tokens=0)).reason
    'max_tokens is 0; allowed: a whole number from 1 to 2147483647'
    """

    def check() -> None:
        _require(isinstance(limits, Limits), "limits", limits, "a pageant.Limits")
        for name in ("max_requests", "max_tokens", "max_seq_len"):
            _require_whole(getattr(limits, name), 1, name)
        total = limits.max_cached_tokens
        _require_whole(total, 1, "max_cached_tokens", or_none=True)

    return _verdict(check)


def require(verdict: Support) -> None:
    """Raise what a verdict says, unless it is a yes."""
    if not verdict.ok:
        raise ArgumentError(verdict.reason or "", verdict.argument or "")


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
    _require_whole(kv_heads, 1, "num_kv_heads", argument="q_heads")
    ok = is_whole(q_heads, 1) and q_heads % kv_heads == 0
    multiple = f"a positive multiple of num_kv_heads ({kv_heads})"
    _require(ok, "num_q_heads", q_heads, multiple, "q_heads")
    _require_whole(q_heads, 1, "num_q_heads", argument="q_heads")


def _check_cache(cache: CacheSpec) -> None:
    _require(isinstance(cache.format, str), "cache", cache.format, "the name of a format")
    _require_whole(cache.page_size, 1, "page_size")
    _require(_is_in(cache.layout, LAYOUTS), "layout", cache.layout, ", ".join(LAYOUTS))


def _check_scale_order(fmt: Format, shape: Shape, cache: CacheSpec) -> None:
    order, name = cache.v_scale_order, "v_scale_order"
    _require(_is_in(order, ("linear", "swizzled")), name, order, "linear, swizzled")
    if order == "swizzled":
        blocks = fmt.num_scales(shape.value_dim)
        ok = bool(fmt.scale_block) and cache.page_size % 4 == 0 and blocks % 4 == 0
        allowed = "linear, unless four tokens' scales of four blocks make a tile: nvfp4, page_size "
        _require(ok, name, order, f"{allowed}a multiple of 4 and v_head_dim one of 64")


def _check_features(features: Features) -> None:
    windows = features.windows
    ok = isinstance(windows, tuple | list) and len(windows) > 0
    ok = ok and all(window is None or is_whole(window, 1, "windows") for window in windows)
    allowed = f"one or more of None and whole numbers from 1 to {LARGEST['windows']}, in a tuple"
    _require(ok, "windows", windows, allowed, "window")
    _require_flags(features, ("soft_cap", "sinks", "alibi", "draft_masks", "non_causal", "lse"))
    formats = features.out_formats
    ok = isinstance(formats, tuple | list) and len(formats) > 0
    ok = ok and all(_is_in(name, OUT_FORMATS) for name in formats)
    _require(ok, "out_formats", formats, f"one or more of {', '.join(OUT_FORMATS)}, in a tuple")


def _check_out_blocks(shape: Shape, features: Features) -> None:
    block = FORMATS["nvfp4"].scale_block
    ok = "nvfp4" not in features.out_formats or shape.value_dim % block == 0
    allowed = f"nvfp4 for a v_head_dim that is a multiple of {block}, not for {shape.value_dim}"
    _require(ok, "out_formats", features.out_formats, allowed)


def _check_parts(features: Features, options: Options) -> None:
    """Raise for ranks without a group, which give parts, if no layer could run there."""
    ranks, formats = options.context_parallel, features.out_formats
    ok = ranks is None or ranks.group is not None or "model" in formats
    allowed = "model among them: without a group ranks give parts, to be quantised when merged"
    _require(ok, "out_formats", formats, allowed)


def _check_options(options: Options) -> None:
    ok = _is_in(options.kernels, (*OWNERS, *NAMES))
    _require(ok, "kernels", options.kernels, KERNELS)
    _require_whole(options.speculative_tokens, 0, "speculative_tokens", argument="spec")
    _require_whole(options.plan_slots, 1, "plan_slots")
    _require_whole(options.debug_splits, 1, "debug_splits", or_none=True)
    table = options.table_kernels
    ok = table is None or isinstance(table, bool)
    _require(ok, "table_kernels", table, "None, True or False")
    _require_flags(options, ("invariant", "adaptive", "non_causal_drafts", "validate", "cascade"))
    _require_flags(options, ("quantize_query",), "q_quant")
    ranks = options.context_parallel
    if ranks is not None:
        _check_ranks(ranks)
        ordered = not options.invariant or ranks.group is None or ranks.comm == "a2a"
        _require(ordered, "comm", ranks.comm, "a2a, in invariant mode", "dcp")


def _check_ranks(ranks: ContextParallel) -> None:
    kind = isinstance(ranks, ContextParallel)
    _require(kind, "context_parallel", ranks, "None, or a pageant.ContextParallel", "dcp")
    world, rank = ranks.world, ranks.rank
    _require_whole(world, 1, "world", argument="dcp")
    ok = is_whole(rank, 0) and rank < world
    _require(ok, "rank", rank, f"a whole number from 0 to {world - 1}", "dcp")
    _require_whole(ranks.interleave, 1, "interleave", argument="dcp")
    _require(_is_in(ranks.comm, COMMS), "comm", ranks.comm, ", ".join(COMMS), "dcp")
    _require(_is_in(ranks.heads, HEADS), "heads", ranks.heads, ", ".join(HEADS), "dcp")
    if ranks.group is None:
        _require(ranks.heads == "all", "heads", ranks.heads, "all, without a group", "dcp")
    else:
        _check_group(ranks)


def _check_group(ranks: ContextParallel) -> None:
    """Raise unless the group's ranks are these."""
    try:
        place = dist.get_rank(ranks.group), dist.get_world_size(ranks.group)
    except (ValueError, RuntimeError, TypeError, AttributeError):
        _require(False, "group", ranks.group, "None, or a torch.distributed process group", "dcp")
    _require(
        place == (ranks.rank, ranks.world),
        "group",
        f"rank {place[0]} of {place[1]}",
        f"rank {ranks.rank} of {ranks.world}, as context_parallel says",
        "dcp",
    )


def _require_flags(owner: object, names: Iterable[str], argument: str | None = None) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(isinstance(value, bool), name, value, "True or False", argument)


def _require(ok: bool, name: str, value: object, allowed: str, argument: str | None = None) -> None:
    """Raise unless `ok`; `argument` is what the error names where fields and options differ."""
    if not ok:
        raise ArgumentError(f"{name} is {value!r}; allowed: {allowed}", argument or name)


def _require_whole(
    value: object, least: int, name: str, *, or_none: bool = False, argument: str | None = None
) -> None:
    """Raise unless the value is a whole number within the bounds of that name."""
    ok = is_whole(value, least, name) or (or_none and value is None)
    _require(ok, name, value, "None, or " * or_none + whole(least, name), argument)


def _is_head_dim(value: Any) -> bool:
    return not isinstance(value, bool) and value in EVERY_HEAD_DIM


def _is_in(name: Any, names: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name in names
