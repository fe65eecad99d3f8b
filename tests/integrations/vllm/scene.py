"""A cache group of vLLM's: layers, builder, pages, and steps over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    compute_layer_kv_cache_shape_bytes,
    get_kv_quant_mode,
)

from pageant.integrations.vllm import compat
from pageant.integrations.vllm.backend import PageantBackend
from pageant.integrations.vllm.builder import PageantBuilder
from pageant.integrations.vllm.impl import PageantImpl
from pageant.ops import dequantize_pages
from pageant.ops.attention import ragged_attention
from pageant.types import Layer

HQ, HKV, D, PAGE, PAGES = 4, 2, 32, 16, 40
# New tokens and all tokens of each request: vLLM's own kinds of batches, made smaller.
BATCHES = {
    "decodes": ([1, 1, 1], [18, 40, 33]),
    "drafts": ([4, 4], [50, 21]),
    "ragged drafts": ([4, 1, 3], [50, 1, 21]),
    "prefills": ([20, 35], [20, 35]),
    "chunks": ([8, 16], [40, 48]),
    "mixed": ([1, 1, 5, 30], [17, 64, 33, 30]),
    "one": ([1], [1]),
    "one prefill": ([100], [100]),
    "long decodes": ([1, 1], [128, 127]),
    "many decodes": ([1] * 8, [3, 16, 17, 40, 1, 33, 64, 31]),
    "more drafts": ([4, 4, 4, 4], [4, 80, 33, 35]),
    "all kinds": ([1, 4, 2, 9, 33, 16], [64, 4, 20, 40, 33, 49]),
    "padded": ([2, 2, 2, 0], [9, 10, 11, 0]),
}


def config(**changes: Any) -> Any:
    """What of a VllmConfig is read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=changes.get("dtype", torch.float32), max_model_len=128),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=128),
        speculative_config=changes.get("speculative"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=0,
            pass_config=SimpleNamespace(fuse_attn_quant=changes.get("fused", False)),
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache", "auto")),
        device_config=SimpleNamespace(device_type="cpu"),
        use_v2_model_runner=False,
    )


class Scene:
    """Layers of one group, their builder, and one cache in a layout of vLLM's."""

    def __init__(
        self, monkeypatch: Any, *layers: dict[str, Any], layout: str = "LBHNC", **changes: Any
    ) -> None:
        self.config, cache = config(**changes), changes.get("cache", "auto")
        self.impls = [
            PageantImpl(HQ, D, D**-0.5, HKV, None, layer.get("window"), cache, layer.get("cap"),
                        sinks=layer.get("sinks"))
            for layer in layers or ({},)
        ]  # fmt: skip
        found = {f"l{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(self.impls)}
        monkeypatch.setattr(compat, "layers_of", lambda *_: found)
        mode = get_kv_quant_mode(cache)
        one_byte = torch.int8 if cache.startswith("int8") else torch.uint8
        dtype = one_byte if mode else self.config.model_config.dtype
        self.spec = PageantBackend.customize_spec(
            FullAttentionSpec(
                block_size=PAGE, num_kv_heads=HKV, head_size=D, dtype=dtype, kv_quant_mode=mode
            )
        )
        self.builder = PageantBuilder(self.spec, list(found), self.config, torch.device("cpu"))
        order = KVCacheLayout[layout].stride_order
        shape = (2, *compute_layer_kv_cache_shape_bytes(self.spec, PAGES))  # layers outermost
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.uint8)
        logical = memory.permute(*(order.index(axis) for axis in range(5)))
        self.cache = logical[1].view(dtype)
        scale = dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), torch.tensor(1.0))
        self.layer = SimpleNamespace(**(scale | changes.get("scales", {})))

    def common(self, lens: tuple[list[int], list[int]], padding: int = 0) -> Any:
        """A step of scattered pages; page 0 is nobody's."""
        new, total = lens
        torch.manual_seed(5)
        pages = torch.randperm(PAGES - 1) + 1
        width = -(-max(total) // PAGE)
        table = torch.zeros(len(new), width, dtype=torch.int32)
        slots = []
        for row, (m, n) in enumerate(zip(new, total, strict=True)):
            count = -(-n // PAGE)
            table[row, :count], pages = pages[:count].int(), pages[count:]
            slots += [int(table[row, p // PAGE]) * PAGE + p % PAGE for p in range(n - m, n)]
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(total, dtype=torch.int32),
            num_reqs=len(new),
            num_actual_tokens=int(starts[-1]) + padding,
            max_query_len=max(new),
            max_seq_len=128,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
        )

    def fill(self, common: Any) -> None:
        """Write the keys and values that were cached before this step."""
        starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
        old = [n - (b - a) for a, b, n in zip(starts, starts[1:], lens, strict=False)]
        slots = [
            int(common.block_table_tensor[row, p // PAGE]) * PAGE + p % PAGE
            for row, count in enumerate(old)
            for p in range(count)
        ]
        if slots:
            k, v = torch.randn(2, len(slots), HKV, D, dtype=self.config.model_config.dtype)
            self.write(k, v, torch.tensor(slots))

    def write(self, k: Any, v: Any, slots: torch.Tensor) -> None:
        self.impls[0].do_kv_cache_update(self.layer, k, v, self.cache, slots)

    def expected(self, common: Any, q: torch.Tensor, layer: Layer, causal: Any = True) -> Any:
        """From dense keys, by the reference."""
        kv, scales = self.impls[0]._wrapped[1], (self.layer._k_scale, self.layer._v_scale)
        dense, table = dequantize_pages(
            kv, common.block_table_tensor, common.seq_lens, dtype=torch.float32, scales=scales
        )
        rows = [
            (int(table[r, p // PAGE]), p % PAGE)
            for r, n in enumerate(common.seq_lens.tolist())
            for p in range(n)
        ]
        pages, offsets = torch.tensor(rows).T
        key_starts = torch.nn.functional.pad(common.seq_lens.cumsum(0), (1, 0)).int()
        return ragged_attention(
            q.float(), dense.k[pages, offsets], dense.v[pages, offsets],
            common.query_start_loc, key_starts, layer=layer, kernels="reference", causal=causal,
        )  # fmt: skip

    def step(self, common: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Query, and the output of each layer: one write, as if they shared keys."""
        dtype, tokens = self.config.model_config.dtype, int(common.query_start_loc[-1])
        metadata = self.builder.build(0, common)
        q = torch.randn(common.num_actual_tokens + 2, HQ, D, dtype=dtype)
        k, v = torch.randn(2, common.num_actual_tokens + 2, HKV, D, dtype=dtype)
        self.write(k, v, common.slot_mapping)
        outs = []
        for impl in self.impls:
            out = torch.full((len(q), HQ * D), 7.0, dtype=dtype)
            assert impl.forward(self.layer, q, k, v, self.cache, metadata, out) is out
            assert (out[tokens:] == 7.0).all(), "rows past the real tokens were written"
            outs.append(out[:tokens].view(tokens, HQ, D))
        return q[:tokens], outs
