"""Once a layer: writes keys and values, attends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from pageant.cache.formats import resolve
from pageant.cache.out_scales import OutScales, SwizzledScales
from pageant.cache.pages import LayerCache
from pageant.integrations.vllm import encoder
from pageant.integrations.vllm.builder import PageantMetadata
from pageant.integrations.vllm.cache import format_of, layer_cache
from pageant.integrations.vllm.encoder import EncoderMetadata
from pageant.plan.copies import DeviceWrites
from pageant.plan.pages import WriteIndex, write_index
from pageant.select.choose import load_step
from pageant.types import Layer, Shape, bad

log = init_logger("vllm.pageant")
E4M3 = torch.float8_e4m3fn


class PageantImpl(AttentionImpl[PageantMetadata]):
    """One layer."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    supports_quant_query_input = False  # a quantised query is taken, but never faster

    def __init__(  # budget: vLLM calls it with these, by position
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            raise bad("attn_type", attn_type, "decoder, encoder_only")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.format = kv_cache_dtype, format_of(kv_cache_dtype)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # Other parts of vLLM read these: keys to the left and right of a row, None for no cap.
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.logits_soft_cap, self.sinks = logits_soft_cap or None, sinks
        self.layer = Layer(
            scale=self.scale,
            window=sliding_window,
            soft_cap=self.logits_soft_cap,
            sinks=None if sinks is None else sinks.detach().to(torch.float32, copy=True),
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes).float(),
            shares_cache=kv_sharing_target_layer_name is not None,
        )
        self.is_encoder = attn_type == AttentionType.ENCODER_ONLY
        if self.is_encoder:
            encoder.check(self.layer)
        self._wrapped: tuple[torch.Tensor, LayerCache] | None = None
        self._scaled: tuple[tuple[object, ...], Layer] = ((), self.layer)

    def shape(self, dtype: torch.dtype) -> Shape:
        """The layer's shape in a model of that type."""
        heads = {"num_q_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return Shape(**heads, head_dim=self.head_size, dtype=dtype)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Weights are there, or there again: sinks keep their address."""
        held = self.layer.sinks
        if self.sinks is None or held is None:
            return
        if held.device == self.sinks.device:
            held.copy_(self.sinks.detach())
        else:
            self.layer = replace(self.layer, sinks=self.sinks.detach().float().clone())
            self._scaled = ((), self.layer)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """fp8 with one scale for all, and nvfp4."""
        from vllm.model_executor.layers.quantization.utils.quant_utils import (
            kFp8StaticTensorSym,
            kNvfp4Dynamic,
        )

        return not self.is_encoder and quant_key in (kFp8StaticTensorSym, kNvfp4Dynamic)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store new keys and values, [>= T, Hkv, D]; negative slots are skipped."""
        if self.is_encoder or kv_cache.numel() == 0:
            return
        cache, scaled = self._cache(kv_cache, key.dtype), self._with_scales(layer)
        page_size = cache.page_size
        index: WriteIndex | DeviceWrites
        if key.is_cuda:
            index = DeviceWrites(slot_mapping, slot_mapping.shape[0])
        else:
            index = write_index(slot_mapping, page_size)
        index.check(cache.num_pages * page_size)
        store = load_step("write_pages", key.device)
        store(key, value, cache, index, (scaled.k_scale, scaled.v_scale))

    def forward(  # budget: vLLM calls it with these
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PageantMetadata | EncoderMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; `output` is written in place.

        Args:
            layer: has the cache's scales.
            query: [>= T, Hq, D].
            key, value: new keys and values, stored already.
            kv_cache: logical [B, H, N, C].
            attn_metadata: the step; None while vLLM measures memory: all of `output` becomes 0.
            output: [>= T, Hq, Dv] or the same flat; fp8 or nvfp4 with a scale.
            output_scale: of a quantised output.
            output_block_scale: nvfp4's block scales, in tiles.
        """
        if attn_metadata is None:
            for tensor in (output, output_block_scale):
                if tensor is not None:
                    tensor.view(torch.uint8).zero_()
            return output
        log.info_once("Pageant: the first layer runs, %s", query.device)
        out = output.view(output.shape[0], self.num_heads, -1)
        if isinstance(attn_metadata, EncoderMetadata):
            if output_scale is not None:
                raise bad("output_scale", "given", "None for encoder_only attention")
            encoder.attend((query, key, value), self.layer, attn_metadata, out)
            return output
        attention = attn_metadata.attention
        scaled = self._with_scales(layer, query, output_scale, output_block_scale)
        attention.run(
            attn_metadata.plan,
            query,
            self._cache(kv_cache, attention.shape.dtype),
            scaled,
            out=out,
            out_scales=_tiles(output_block_scale),
        )
        return output

    def _cache(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> LayerCache:
        """The layer's pages; vLLM hands over the same tensor every step."""
        if self._wrapped is None or self._wrapped[0] is not kv_cache:
            wrapped = layer_cache(kv_cache.detach(), self.shape(dtype), self.format)
            self._wrapped = kv_cache, wrapped
        return self._wrapped[1]

    def _with_scales(
        self,
        layer: Any,
        query: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> Layer:
        """The layer with the scales that matter, tensors that are read when it runs."""
        scales: dict[str, Any] = {}
        if resolve(self.format, torch.float32).bits < 16:
            scales |= {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        if query is not None and query.dtype.itemsize == 1:
            scales["q_scale"] = layer._q_scale
        if output_scale is not None:
            name = "fp8_e4m3" if output_block_scale is None else "nvfp4"
            scales |= {"out_scale": output_scale, "out_format": name}
        key = tuple(scales.values())
        known, made = self._scaled
        if len(known) == len(key) and all(a is b for a, b in zip(known, key, strict=True)):
            return made
        made = replace(self.layer, **scales)
        self._scaled = key, made
        return made


def _tiles(block_scales: torch.Tensor | None) -> OutScales | None:
    """vLLM's block scales: e4m3 in tiles of 128 rows, perhaps handed over as whole words."""
    if block_scales is None:
        return None
    return SwizzledScales(block_scales.view(E4M3))
