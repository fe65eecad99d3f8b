"""Once a step: vLLM's metadata in, a plan out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from pageant.api import Attention
from pageant.integrations.vllm import compat
from pageant.integrations.vllm.cache import format_of
from pageant.integrations.vllm.encoder import EncoderMetadata
from pageant.integrations.vllm.group import attention_of, features_of, options_of
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.select.explain import explain
from pageant.types import CacheSpec, Layer, Shape

log = init_logger("vllm.pageant")


@dataclass
class PageantMetadata:
    """One planned step of one cache group.

    Attributes:
        attention: the group's.
        plan: of the step.
        num_actual_tokens: tokens, padding included.
        slot_mapping: int64 [T].
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: how the step divides.
    """

    attention: Attention
    plan: Plan
    num_actual_tokens: int
    slot_mapping: torch.Tensor

    @property
    def num_decodes(self) -> int:
        """Requests that decode."""
        return self.plan.split.num_decodes

    @property
    def num_prefills(self) -> int:
        """Requests that prefill."""
        return self.plan.split.num_prefills

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decodes."""
        return self.plan.split.num_decode_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prefills."""
        return self.plan.split.num_prefill_tokens


class PageantBuilder(AttentionMetadataBuilder[PageantMetadata]):
    """Plans for the layers of one cache group."""

    supports_update_block_table = False  # another table is another plan
    supports_draft_decode_metadata_update = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.is_encoder = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        if self.is_encoder:
            log.info("Pageant: %d encoder-only layers, without a cache", len(layer_names))
            return
        layers = compat.layers_of(vllm_config, layer_names)
        impls = [layer.impl for layer in layers.values()]
        self.attention = attention_of(kv_cache_spec, impls, vllm_config, device)
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        rows = self.attention.explain().rows
        log.info(
            "Pageant: %d layers, %s cache in pages of %d, prefill %s, decode %s",
            len(impls),
            self.attention.format.name,
            kv_cache_spec.block_size,
            rows["prefill"].name,
            rows["decode"].name,
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What the chosen kernels say; encoders plan on the host, while they run."""
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        model, spec = vllm_config.model_config, kv_cache_spec
        answer = explain(
            Shape(
                num_q_heads=spec.num_kv_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_size,
                v_head_dim=spec.head_size_v,
                dtype=model.dtype,
            ),
            CacheSpec(
                format=format_of(vllm_config.cache_config.cache_dtype), page_size=spec.block_size
            ),
            features_of([Layer()], vllm_config),
            replace(options_of(vllm_config, sharded=False)),
            vllm_config.device_config.device_type,
        )
        return AttentionCGSupport[answer.to_dict()["cuda_graph"]]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PageantMetadata | EncoderMetadata:
        """Plan a step.

        Args:
            common_prefix_len: not looked at: shared pages are found in the page table.
            common_attn_metadata: vLLM's description of the step.
            fast_build: plans are as fast as they get.
        """
        if self.is_encoder:
            return EncoderMetadata.of(common_attn_metadata)
        batch = batch_of(common_attn_metadata, self.attention.limits.max_seq_len)
        assert batch.slot_mapping is not None
        plan = self.attention.plan(batch)
        return PageantMetadata(self.attention, plan, batch.num_tokens, batch.slot_mapping)

    def update_draft_decode_metadata(self, metadata: PageantMetadata) -> None:
        """Plan again after lengths and slots changed in place (drafters, within one graph)."""
        self.attention.update(metadata.plan)


def batch_of(common: Any, max_seq_len: int) -> Batch:
    """A Batch of vLLM's CommonAttentionMetadata, whose bounds may lie past the longest text."""
    tokens, starts = common.num_actual_tokens, common.query_start_loc
    slots = common.slot_mapping
    return Batch(
        query_start_loc=starts,
        seq_lens=common.seq_lens,
        page_table=common.block_table_tensor,
        slot_mapping=slots if slots.shape[0] == tokens else slots[:tokens],
        num_requests=common.num_reqs,
        num_tokens=tokens,
        max_query_len=common.max_query_len,
        max_seq_len=min(common.max_seq_len, max_seq_len),
        causal=common.causal,
        # Where the device is the CPU, the host copy says nothing new.
        query_start_loc_cpu=None if starts.is_cpu else common.query_start_loc_cpu,
    )
