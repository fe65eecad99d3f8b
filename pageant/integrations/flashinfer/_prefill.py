"""What the two prefill wrappers share: custom masks, graph buffers, positional run arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pageant.integrations.flashinfer import _masks
from pageant.integrations.flashinfer._lengths import Keys, Queries
from pageant.integrations.flashinfer._setting import Factors
from pageant.integrations.flashinfer._wrapper import Wrapper
from pageant.integrations.flashinfer.absent import refuse, refuse_jit
from pageant.types import Scalar

VARIANT = 11  # place of the variant's name in FlashInfer's jit_args


class PrefillWrapper(Wrapper):
    """A wrapper whose requests bring any number of tokens."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._takes_sinks = _is_sink_variant(jit_args)
        if not self._takes_sinks:
            refuse_jit(jit_args)
        self._qo_indptr_buf: torch.Tensor | None = None
        self._has_mask_buffers = False

    def _take_buffers(
        self,
        qo_indptr_buf: torch.Tensor | None,
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
    ) -> None:
        if self._use_cuda_graph and not isinstance(qo_indptr_buf, torch.Tensor):
            raise ValueError("qo_indptr_buf is None; allowed with CUDA graphs: a tensor")
        self._qo_indptr_buf = qo_indptr_buf if self._use_cuda_graph else None
        self._has_mask_buffers = custom_mask_buf is not None and mask_indptr_buf is not None

    def _put_starts(self, qo_indptr: torch.Tensor) -> torch.Tensor:
        """The offsets as given; with graphs also copied to their buffer."""
        if self._qo_indptr_buf is not None:
            if qo_indptr.shape != self._qo_indptr_buf.shape:
                have = f"a batch of {qo_indptr.shape[0] - 1}"
                raise ValueError(f"{have}; allowed: {self._qo_indptr_buf.shape[0] - 1}")
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=True)
        return qo_indptr

    def _mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        queries: Queries,
        keys: Keys,
    ) -> torch.Tensor | None:
        """The custom mask, flat and unpacked; None without one."""
        if custom_mask is None and packed_custom_mask is None:
            return None
        if self._use_cuda_graph and not self._has_mask_buffers:
            raise ValueError("custom masks with CUDA graphs need custom_mask_buf, mask_indptr_buf")
        sizes = None
        if queries.host is not None and keys.host is not None:
            sizes = queries.host.diff().long() * keys.host
        if packed_custom_mask is not None and custom_mask is None:
            if sizes is None:
                refuse("packed_custom_mask with lengths on a GPU")
            return _masks.unpack(packed_custom_mask, sizes)
        assert custom_mask is not None
        if sizes is not None and custom_mask.numel() != int(sizes.sum()):
            have = f"custom_mask has {custom_mask.numel()} entries"
            raise ValueError(f"{have}; allowed: {int(sizes.sum())}, the sum of qo_len * kv_len")
        return custom_mask.reshape(-1).bool()

    @staticmethod
    def _refuse_items(*pointers: torch.Tensor | None) -> None:
        if any(pointer is not None for pointer in pointers):
            refuse("multi-item scoring")


def _is_sink_variant(jit_args: Sequence[Any] | None) -> bool:
    return bool(jit_args) and len(jit_args or ()) > VARIANT and jit_args[VARIANT] == "AttentionSink"  # type: ignore[index]


def heads_and_factors(
    args: tuple[Any, ...],
    takes_sinks: bool,
    q_scale: Scalar | None,
    k_scale: Scalar | None,
    v_scale: Scalar | None,
    sinks: torch.Tensor | None,
) -> Factors:
    """What run's arguments scale, the positional ones included."""
    scale = None
    heads: list[torch.Tensor | None] = [None, None, None]
    if takes_sinks and args:
        sinks, scale = args[0], float(args[1]) if len(args) > 1 else None
        refuse_jit(args[2:])
    elif args:
        if len(args) != 3 or not all(x is None or isinstance(x, torch.Tensor) for x in args):
            refuse_jit(args)
        heads = list(args)
    return Factors(
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        q_heads=heads[0],
        k_heads=heads[1],
        v_heads=heads[2],
        sinks=sinks,
        scale=scale,
    )
