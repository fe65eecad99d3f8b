"""What run and write are given, checked; a call like an earlier one is found again instead."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch

from pageant.cache.formats import Format
from pageant.cache.out_scales import OutScales
from pageant.cache.pages import LayerCache
from pageant.cache.scales import LOADED, check_scale
from pageant.cache.tensors import spans_meet
from pageant.plan.batch import Batch
from pageant.plan.inputs import (
    LayerParams,
    check_cache,
    check_cache_writable,
    check_new_rows,
    check_query,
    check_unpaged,
)
from pageant.plan.outputs import check_output, zeroed
from pageant.types import CacheSpec, Features, Layer, Shape

ALIGNED = 16  # bytes; compiled code may rely on that
UNUSED = LayerParams(score_scale=1.0)
MOST = 4096  # calls remembered; a model has one for each layer and size of a batch
MOST_PLACES = 64  # of each


@dataclass(eq=False, slots=True)
class Known:
    """Calls whose cache and layer are the same, and whose tensors are of the same kinds.

    Attributes:
        cache: whose pages they are; not kept alive.
        layer: whose numbers they are.
        tensors: of the layer.
        memory: where the tensors of both lie, and their sizes.
        params: the layer's numbers, of which write uses none.
        places: addresses and lengths of q and out that were found to harm nothing.
        kept: see ``AttentionCall.kept``.
    """

    cache: ref[LayerCache]
    layer: Layer
    tensors: tuple[torch.Tensor, ...]
    memory: list[Hashable]
    params: LayerParams = UNUSED
    places: set[tuple[int, int, int, int]] = field(default_factory=set)
    kept: dict[Any, Any] = field(default_factory=dict)

    def has_place(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor | None) -> bool:
        """Whether it is sure that writing `out` harms nothing: it lies apart from all else."""
        if out is None:
            return True
        place = (q.data_ptr(), q.shape[0], out.data_ptr(), out.shape[0])
        if place not in self.places:
            others = (q, *cache.tensors, self.layer.sinks, self.layer.alibi_slopes)
            if any(other is not None and spans_meet(out, other) for other in others):
                return False
            if len(self.places) >= MOST_PLACES:
                self.places.clear()
            self.places.add(place)
        return True


@dataclass(frozen=True)
class Calls:
    """Checks calls of run and write for one Attention.

    Attributes:
        shape, spec, fmt, features, device: the Attention's.
        resolve: gives a layer's numbers, see ``resolve_layer``.
    """

    shape: Shape
    spec: CacheSpec
    fmt: Format
    features: Features
    device: torch.device
    resolve: Callable[..., LayerParams]
    known: dict[Hashable, Known] = field(default_factory=dict)

    def check_run(
        self,
        batch: Batch,
        q: torch.Tensor,
        cache: LayerCache | None,
        layer: Layer,
        out: torch.Tensor | None,
        out_scales: OutScales | None,
        new: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> Known:
        """Raise for a mistake in what run is given; `new` are its k and v."""
        kind = _kind("run", cache, layer, q, out)
        found = self._find(kind, cache, batch.num_tokens, q, out)
        is_usual = out_scales is None and new[0] is None and new[1] is None
        if found is not None and cache is not None and is_usual and found.has_place(q, cache, out):
            return found
        cache = check_cache(cache, self.shape, self.spec, self.fmt, self.device)
        check_query(q, self.shape, batch.num_tokens, self.device)
        params = self.resolve(layer, self.features, self.shape, self.fmt, q)
        check_unpaged(*new, self.shape, batch, self.device)
        check_output(out, out_scales, q, cache, params, self.shape, batch.num_tokens)
        if out is not None and not _lie_in_order(out):
            kind = None
        return self._remember(kind, cache, layer, params)

    def zeroed(
        self,
        q: torch.Tensor,
        layer: Layer,
        out: torch.Tensor | None,
        out_scales: OutScales | None,
        new: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """The output of a run that attends to nothing: what was given, all of it 0; or new."""
        check_query(q, self.shape, 0, self.device)
        params = self.resolve(layer, self.features, self.shape, self.fmt, q)
        check_unpaged(*new, self.shape, None, self.device)
        return zeroed(out, out_scales, q, self.shape, params)

    def check_write(
        self,
        num_tokens: int,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        layer: Layer,
    ) -> Known:
        """Raise for a mistake in what write is given."""
        kind = _kind("write", cache, layer, k, v)
        found = self._find(kind, cache, num_tokens, k, v)
        if found is not None:
            return found
        check_cache(cache, self.shape, self.spec, self.fmt, self.device)
        check_cache_writable(cache)
        check_new_rows(k, v, self.shape, num_tokens, self.device)
        check_scale("layer.k_scale", layer.k_scale)
        check_scale("layer.v_scale", layer.v_scale)
        return self._remember(kind, cache, layer)

    def _find(
        self,
        kind: Hashable,
        cache: LayerCache | None,
        num_tokens: int,
        x: torch.Tensor,
        y: torch.Tensor | None,
    ) -> Known | None:
        """What is known of such a call, if these tensors have rows enough."""
        try:
            found = self.known.get(kind)
        except TypeError:  # of a wrong type; the checks say which
            return None
        if found is None or cache is None or found.cache() is not cache:
            return None
        if found.memory != _memory((*cache.tensors, *found.tensors)):
            del self.known[kind]
            return None
        rows = x.shape[0] if y is None else min(x.shape[0], y.shape[0])
        return found if rows >= num_tokens else None

    def _remember(
        self, kind: Hashable, cache: LayerCache, layer: Layer, params: LayerParams = UNUSED
    ) -> Known:
        tensors = _tensors_of(layer)
        checked = Known(ref(cache), layer, tensors, _memory((*cache.tensors, *tensors)), params)
        if kind is None or not _lasts(layer, self.device):
            return checked
        found = self.known.get(kind)
        if found is not None and found.cache() is cache:
            return found
        if len(self.known) >= MOST:
            self.known.clear()
        self.known[kind] = checked
        finalize(cache, self.known.pop, kind, None)
        return checked


def _kind(
    what: str, cache: LayerCache | None, layer: Layer, x: torch.Tensor, y: torch.Tensor | None
) -> Hashable:
    """What checks and compiled code depend on; None if something is of a wrong type."""
    try:
        return (
            what,
            id(cache),
            layer,
            *_traits(x),
            None if y is None else (*_traits(y), y.is_inference()),
            torch.is_inference_mode_enabled(),
        )
    except (AttributeError, RuntimeError, TypeError):
        return None


def _tensors_of(layer: Layer) -> tuple[torch.Tensor, ...]:
    scales = (layer.q_scale, layer.k_scale, layer.v_scale, layer.out_scale)
    parts = (layer.sinks, layer.alibi_slopes, *scales)
    return tuple([part for part in parts if isinstance(part, torch.Tensor)])


def _memory(tensors: Iterable[torch.Tensor]) -> list[Hashable]:
    """Where what a call may read lies, and how much there is."""
    return [(x.data_ptr(), x.shape, x.requires_grad) for x in tensors]


def _lie_in_order(out: torch.Tensor) -> bool:
    """Whether each row ends before the next begins, however many there are."""
    if out.numel() == 0:  # nobody looked whether heads overlap
        return False
    inner = zip(out.shape[1:], out.stride()[1:], strict=True)
    return out.stride(0) > sum((size - 1) * step for size, step in inner)


def _traits(x: torch.Tensor) -> tuple[Hashable, ...]:
    traits = (x.shape[1:], x.stride(), x.dtype, x.device, x.requires_grad)
    return (*traits, x.data_ptr() % ALIGNED == 0)


def _lasts(layer: Layer, device: torch.device) -> bool:
    """Whether the layer's numbers stay: those in tensors may change, unless kernels read them."""
    scales = (layer.q_scale, layer.k_scale, layer.v_scale, layer.out_scale)
    return all(
        not isinstance(scale, torch.Tensor)
        or (device.type != "cpu" and scale.device == device and scale.dtype in LOADED)
        for scale in scales
    )
