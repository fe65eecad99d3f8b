"""The public surface: an Attention plans once a step, then writes and runs once a layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pageant.cache.formats import resolve
from pageant.cache.out_scales import OutScales
from pageant.cache.pages import LayerCache, PagedCache, layout_for
from pageant.cache.wrap import wrap
from pageant.device import Device
from pageant.graphs import GraphMemory
from pageant.kernels.launch import launch, never_compiled
from pageant.kernels.warmup import Progress, warm_up
from pageant.parallel import run as parallel
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.plan.calls import Calls
from pageant.plan.inputs import layer_of, partial_params
from pageant.plan.outputs import new_lse, new_out
from pageant.plan.planners import planner_of
from pageant.select.bounds import require_whole
from pageant.select.choose import load_stores
from pageant.select.explain import Explanation, explain
from pageant.select.validate import check_config, check_limits, require
from pageant.types import CacheSpec, Features, Layer, Limits, Options, Shape, bad


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

    Three tokens; the query is zero, so every key weighs the same:

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
        self.cache = CacheSpec() if cache is None else cache
        self.limits = Limits() if limits is None else limits
        self.features = Features() if features is None else features
        self.options = Options() if options is None else options
        parts = self.cache, self.features, self.options
        require(check_config(shape, *parts))
        found = Device.detect(device)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._ranks = self.options.context_parallel
        self._explanation = explain(shape, *parts, found)
        require(self._explanation.support)
        require(check_limits(self.limits))
        self.format = resolve(self.cache.format, shape.dtype)
        row = self._explanation.rows["decode"]
        self._planner = planner_of(row)(shape, self.limits, *parts, self.device, self._explanation)
        self._write, self._quantize = load_stores(row)
        given = shape, self.cache, self.format, self.features, self.device
        self._calls = Calls(*given, self._planner.resolve)
        self.graph_memory: GraphMemory | None = None  # of its CUDA graphs, once there is one

    def explain(self) -> Explanation:
        """Which kernel serves each phase, and why each earlier one was refused."""
        return self._explanation

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory, allocated once; enough for every batch within the limits."""
        return self._planner.workspace.num_bytes

    def new_cache(self, *, num_layers: int, num_pages: int) -> PagedCache:
        """Memory for the keys and values of `num_layers` layers, `num_pages` pages each, zeroed."""
        for name, count in (("num_layers", num_layers), ("num_pages", num_pages)):
            require_whole(name, count)
        layout = layout_for(self.shape, self.cache, num_layers, num_pages)
        try:
            return PagedCache(layout, self.format, self.device, self.cache.v_scale_order)
        except RuntimeError:  # torch's error when memory does not suffice
            allowed = f"what fits in memory; this takes {layout.num_bytes} bytes"
            raise bad("num_pages", num_pages, allowed) from None

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
        require_whole("num_bytes", num_bytes, least=0)
        require_whole("num_layers", num_layers)
        return num_bytes // layout_for(self.shape, self.cache, num_layers, 1).num_bytes

    def plan(self, batch: Batch) -> Plan:
        """Decide what each kernel does this step; raise first for any mistake in the batch."""
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
        layer = layer_of(layer)
        index = self._planner.require(plan).buffers.batch.writes
        if index is None:
            raise bad("batch.slot_mapping", None, "a tensor, for plans that write")
        known = self._calls.check_write(index.num_tokens, k, v, cache, layer)
        index.check(cache.num_pages * cache.page_size)
        if not layer.shares_cache:
            self._write(k, v, cache, index, (layer.k_scale, layer.v_scale), known.kept)

    def warmup(
        self,
        layers: Iterable[Layer] | None = None,
        cache: LayerCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Compile, in parallel, every kernel that may run; plans made before are void.

        Args:
            layers: those that will run; None: every combination of declared features, with scales
                that are numbers.
            cache: one of theirs; None: any of `new_cache`.
            progress: told how many kernels are ready, of how many.
        """
        warm_up(self, cache, layers, progress, forget=self._calls.known.clear)

    @never_compiled
    def run(  # budget: the public API, one argument for each thing a layer gives
        self,
        plan: Plan | None,
        q: torch.Tensor,
        cache: LayerCache | None,
        layer: Layer | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_scales: OutScales | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned tokens over their requests' cached keys.

        Args:
            plan: the step's plan.
            q: [T, Hq, D], model dtype, or fp8 with ``layer.q_scale``; more rows are left alone.
            cache: the layer's pages, new tokens already written.
            layer: what differs in this layer; None means a plain one.
            k, v: the new tokens' keys and values, for kernels that read them unpaged.
            out: [>= T, Hq, Dv] of ``layer.out_format`` (nvfp4: uint8 [.., Dv / 2], the even element
                low), written in place: memory of its own, or q's with its strides. None makes it.
            out_scales: block scales of nvfp4, written: e4m3 [>= T, Hq * Dv / 16], or in tiles, see
                ``pageant.SwizzledScales``; None for other formats.
            return_lse: also return the log-sum-exp.

        A host that measures memory has neither plan nor cache yet: with None for both nothing is
        attended, and all of `out` and `out_scales` becomes 0, every lse -inf.

        Returns:
            `out`; with `return_lse` also float32 [T, Hq], natural log, without sinks.
            Rows without a visible key are 0 and -inf, and so is padding in tensors made here.
        """
        layer = layer_of(layer)
        may_return = self.features.lse or self._ranks is not None
        if not isinstance(return_lse, bool) or return_lse > may_return:
            raise bad("return_lse", return_lse, "False, unless Features(lse=True) is declared")
        if plan is None and cache is None:
            out = self._calls.zeroed(q, layer, out, out_scales, (k, v))
            return (out, new_lse(q)) if return_lse else out
        plan = self._planner.require(plan)
        known = self._calls.check_run(plan.batch, q, cache, layer, out, out_scales, (k, v))
        params, real, kernels = known.params, plan.buffers.real_tokens, self._explanation.rows
        assert cache is not None
        plan.buffers.pages.check(cache.num_pages)
        if out is None:
            out = new_out(q, plan.buffers.known_tokens, self.shape, params)
        q = q if q.dtype == self.shape.dtype else q.to(self.shape.dtype)
        is_last = params.out_format == "model" or self._planner.quantizes_out
        rows = out if is_last else self._planner.workspace.finished
        lse = new_lse(q) if return_lse else None
        if self._ranks is not None and self._ranks.group is not None:
            rows, whole_lse = parallel.run(kernels, plan, q, cache, params, self._ranks)
            if lse is not None:
                lse[:real] = whole_lse
        else:
            params = params if self._ranks is None else partial_params(params, return_lse)
            launch(kernels, plan, q, cache, params, rows, lse, known.kept, out_scales)
        if not is_last:
            ends = plan.buffers.batch.query_start_loc[-1:]
            self._quantize(rows[:real], out, out_scales, params, ends, known.kept)
        elif rows is not out:
            out[:real] = rows
        return out if lse is None else (out, lse)
