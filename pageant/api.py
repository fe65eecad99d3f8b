"""The public surface: an Attention plans once a step, then writes and runs once a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from pageant.cache.formats import resolve
from pageant.cache.pages import LayerCache, PagedCache, layout_for
from pageant.cache.wrap import wrap
from pageant.device import Device
from pageant.kernels.cpu.write_pages import write_pages
from pageant.kernels.launch import launch
from pageant.plan.batch import Batch
from pageant.plan.build import Plan, Planner
from pageant.plan.inputs import (
    check_cache,
    check_new_rows,
    check_query_rows,
    check_scale,
    resolve_layer,
)
from pageant.select.explain import Explanation, explain
from pageant.select.validate import check_limits
from pageant.types import (
    ArgumentError,
    CacheSpec,
    Features,
    Layer,
    Limits,
    Options,
    Shape,
    bad,
)

PLAIN = Layer()
Params = ParamSpec("Params")
Result = TypeVar("Result")


def _never_compiled(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Make ``torch.compile`` leave a function alone.

    ``torch.compiler.disable`` as a decorator would load the compiler, a second or more, on import.
    """

    @functools.wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if torch.compiler.is_compiling():
            eager: Callable[Params, Result] = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Attention:
    """Attention over a paged cache, for layers of one shape.

    Which kernels run is decided here, once; ``explain()`` says which, and why.

    Args:
        shape: heads, head sizes and model dtype.
        cache: how keys and values are stored.
        limits: bounds of every batch; all buffers are sized by them now.
        features: what layers and batches may ask for.
        options: how to work.
        device: "cpu" or a CUDA device.

    Raises:
        ArgumentError: the reason ``pageant.supports`` gives, naming the argument.

    One request of three tokens. The query is zero, so every key weighs the same:

    >>> attn = Attention(
    ...     Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
    ...     CacheSpec(page_size=4),
    ...     device="cpu",
    ... )
    >>> kv = attn.new_cache(num_layers=1, num_pages=8)
    >>> plan = attn.plan(Batch.from_lengths([3], [3], [[5]], page_size=4))
    >>> v = torch.tensor([0.0, 1.0, 5.0])[:, None, None].expand(3, 1, 16)
    >>> attn.write(plan, kv[0], torch.ones(3, 1, 16), v)
    >>> attn.run(plan, torch.zeros(3, 2, 16), kv[0])[:, 0, 0]
    tensor([0.0000, 0.5000, 2.0000])
    """

    def __init__(
        self,
        shape: Shape,
        cache: CacheSpec | None = None,
        limits: Limits | None = None,
        features: Features | None = None,
        options: Options | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.cache = cache or CacheSpec()
        self.limits = limits or Limits()
        self.features = features or Features()
        self.options = options or Options()
        found = Device.detect(device)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._explanation = explain(shape, self.cache, self.features, self.options, found)
        for verdict in (self._explanation.support, check_limits(self.limits)):
            if not verdict.ok:
                raise ArgumentError(verdict.reason or "", verdict.argument or "")
        self.format = resolve(self.cache.format, shape.dtype)
        self._planner = Planner(
            shape, self.cache, self.limits, self.features, self.options, self.device
        )

    def explain(self) -> Explanation:
        """Which kernel serves each phase, and why each earlier one was refused."""
        return self._explanation

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory, allocated once; enough for every batch within the limits."""
        return self._planner.workspace.num_bytes

    def new_cache(self, *, num_layers: int, num_pages: int) -> PagedCache:
        """Memory for the keys and values of `num_layers` layers, `num_pages` pages each, zeroed."""
        for name, value in (("num_layers", num_layers), ("num_pages", num_pages)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise bad(name, value, "a whole number from 1 up")
        layout = layout_for(self.shape, self.cache, num_layers, num_pages)
        return PagedCache(layout, self.format, self.device, self.cache.v_scale_order)

    def wrap_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> LayerCache:
        """One layer's cache over tensors that exist already; nothing is copied.

        Args:
            k: keys [P, N, Hkv, D], any strides with unit content stride; or, alone, keys and
                values in one tensor whose axes stand in the layout's order, layer left out
                ([P, Hkv, N, D + Dv] for LBHNC).
            v: values [P, N, Hkv, Dv].
            k_scales, v_scales: scales stored with the pages, for formats that have them.
        """
        return wrap(self.shape, self.cache, (k, v), (k_scales, v_scales), self.device)

    def pages_for(self, num_bytes: int, num_layers: int) -> int:
        """How many pages of every layer fit into `num_bytes`."""
        for name, value, least in (("num_bytes", num_bytes, 0), ("num_layers", num_layers, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise bad(name, value, f"a whole number from {least} up")
        return num_bytes // layout_for(self.shape, self.cache, num_layers, 1).num_bytes

    def plan(self, batch: Batch) -> Plan:
        """Decide what each kernel does this step.

        Raises:
            ArgumentError: for any mistake in the batch, before anything is written.
        """
        return self._planner.plan(batch)

    def update(self, plan: Plan) -> None:
        """Plan again after lengths, offsets or tables of the plan's batch changed in place."""
        self._planner.update(plan)

    def write(
        self,
        plan: Plan,
        cache: LayerCache,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Layer | None = None,
    ) -> None:
        """Store the new tokens' keys and values at the batch's slots.

        Args:
            plan: the step's plan.
            cache: the layer's pages.
            k, v: [T, Hkv, D] and [T, Hkv, Dv]; rows beyond the slot mapping's are ignored.
            layer: k_scale and v_scale; a layer with `shares_cache` writes nothing.
        """
        layer = layer or PLAIN
        self._planner.require(plan)
        check_cache(cache, self.shape, self.format, self.cache.page_size)
        index = plan.buffers.writes
        if index is None:
            raise bad("batch.slot_mapping", None, "a tensor, for plans that write")
        index.check(cache.num_pages * cache.page_size)
        check_new_rows(k, v, self.shape, index.num_tokens, self.device)
        check_scale("layer.k_scale", layer.k_scale)
        check_scale("layer.v_scale", layer.v_scale)
        if not layer.shares_cache:
            write_pages(k, v, cache, index, (layer.k_scale, layer.v_scale))

    @_never_compiled
    def run(  # budget: the public API, one argument for each thing a layer gives
        self,
        plan: Plan,
        q: torch.Tensor,
        cache: LayerCache,
        layer: Layer | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned tokens over their requests' cached keys.

        Args:
            plan: the step's plan.
            q: [T, Hq, D], model dtype, or fp8 with ``layer.q_scale``; more rows are left alone.
            cache: the layer's pages, new tokens already written.
            layer: what differs in this layer; None means a plain one.
            k, v: the new tokens' keys and values, for kernels that read them unpaged.
            out: [>= T, Hq, Dv], model dtype, written in place; None allocates it.
            out_scales: block scales of a quantised output.
            return_lse: also return the log-sum-exp.

        Returns:
            out [T, Hq, Dv]; with `return_lse` also float32 [T, Hq], natural log, without sinks.
            Rows without a visible key are 0 and -inf, and so is padding in tensors made here.
        """
        layer = layer or PLAIN
        self._planner.require(plan)
        check_cache(cache, self.shape, self.format, self.cache.page_size)
        plan.buffers.pages.check(cache.num_pages)
        if return_lse and not self.features.lse:
            raise bad("return_lse", True, "False, unless Features(lse=True) is declared")
        if out_scales is not None:
            raise bad("out_scales", "given", "None for layers whose out_format is 'model'")
        if (k is None) != (v is None):
            raise bad("k" if k is None else "v", None, "k and v together, or neither")
        check_query_rows(q, out, self.shape, plan.batch.num_tokens, self.device)
        params = resolve_layer(layer, self.features, self.shape, self.format, q)
        q = q.to(self.shape.dtype)
        if out is None:
            out = q.new_empty(q.shape[0], self.shape.num_q_heads, self.shape.value_dim)
            out[plan.buffers.real_tokens :] = 0
        lse = None
        if return_lse:
            lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        launch(self._explanation.rows, plan, q, cache, params, out, lse)
        return out if lse is None else (out, lse)
