"""What the layers of one cache group need, as an Attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pageant.api import Attention
from pageant.integrations.vllm import compat
from pageant.integrations.vllm.cache import format_of
from pageant.ranks import ContextParallel
from pageant.types import CacheSpec, Features, Layer, Limits, Options, bad


def attention_of(spec: Any, impls: Sequence[Any], config: Any, device: torch.device) -> Attention:
    """The Attention of a group.

    Args:
        spec: the group's AttentionSpec, whose block size is the kernels' page size.
        impls: the PageantImpl of each of its layers.
        config: the VllmConfig.
        device: where it runs.

    Raises:
        ArgumentError: a configuration that no kernel serves, or layers that differ in shape.
    """
    shapes = {impl.shape(config.model_config.dtype) for impl in impls}
    formats = {format_of(impl.kv_cache_dtype) for impl in impls}
    for name, found in (("head counts and sizes", shapes), ("cache types", formats)):
        if len(found) != 1:
            raise bad("layers", f"{len(found)} {name}", "the same of each in one cache group")
    cache = CacheSpec(format=formats.pop(), page_size=spec.block_size)
    features = features_of([impl.layer for impl in impls], config)
    options = options_of(config, sharded=spec.dcp_sharded)
    return Attention(shapes.pop(), cache, limits_of(config), features, options, device)


def features_of(layers: Sequence[Layer], config: Any) -> Features:
    """What the layers may ask for; outputs are quantised only where vLLM fuses that."""
    formats = ("model", "fp8_e4m3", "nvfp4") if compat.fuses_output(config) else ("model",)
    declared = Features.of(layers, non_causal=True)
    return Features(**{**vars(declared), "out_formats": formats})


def limits_of(config: Any) -> Limits:
    """Bounds of a step; drafts may stand past the end of the longest text."""
    drafts = speculative_tokens(config)
    scheduler = config.scheduler_config
    slots = scheduler.max_num_seqs * (1 + 2 * drafts)  # parallel drafters add as many masks
    return Limits(
        max_requests=max(scheduler.max_num_seqs, compat.largest_graph(config)),
        max_tokens=max(scheduler.max_num_batched_tokens, slots, compat.largest_graph(config)),
        max_seq_len=config.model_config.max_model_len + 2 * drafts + 1,
    )


def options_of(config: Any, *, sharded: bool = True) -> Options:
    """How vLLM wants Pageant to work."""
    return Options(
        invariant=compat.is_batch_invariant(),
        speculative_tokens=speculative_tokens(config),
        context_parallel=ranks_of(config) if sharded else None,
    )


def speculative_tokens(config: Any) -> int:
    """Draft tokens a request may carry, 0 without speculation."""
    speculative = config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens or 0


def ranks_of(config: Any) -> ContextParallel | None:
    """This rank's share of every sequence, if several share it; heads are each rank's own."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    return ContextParallel(
        rank=group.rank_in_group,
        world=group.world_size,
        interleave=parallel.cp_kv_cache_interleave_size,
        group=group.device_group,
        comm="a2a" if parallel.dcp_comm_backend == "a2a" else "ag_rs",
        heads="split",
    )
