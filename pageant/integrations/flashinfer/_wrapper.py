"""What the wrapper classes share: their construction, graph buffers, and attributes hosts read."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import (
    DType,
    cap_of,
    check_layout,
    check_no_rope,
    dtype_of,
    scale_of,
    window_of,
)
from pageant.integrations.flashinfer._lengths import Keys
from pageant.integrations.flashinfer._runner import Result, Runner, Step
from pageant.integrations.flashinfer._setting import Setting

Params = ParamSpec("Params")
Value = TypeVar("Value")
LEAST_BYTES = 16  # of a workspace


def warns_of_positions(count: int) -> Callable[[Callable[Params, Value]], Callable[Params, Value]]:
    """A method whose arguments past the first `count` are deprecated by position."""

    def decorate(function: Callable[Params, Value]) -> Callable[Params, Value]:
        @functools.wraps(function)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Value:
            if len(args) > count + 1:
                text = "optional arguments of plan by position are deprecated; name them"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return call

    return decorate


@dataclass(frozen=True)
class PagedBuffers:
    """FlashInfer's graph buffers for a page table, or none.

    Attributes:
        indptr, indices, last_page_len: the caller's, written by every plan; None without graphs.
    """

    indptr: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None

    @classmethod
    def of(cls, use_cuda_graph: bool, *buffers: torch.Tensor | None) -> PagedBuffers:
        """The buffers, if graphs are used.

        Raises:
            ValueError: one of them is missing.
        """
        if not use_cuda_graph:
            return cls()
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        for name, buffer in zip(names, buffers, strict=True):
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name}_buffer is {buffer!r}; allowed with CUDA graphs: a tensor")
        return cls(*buffers)

    @property
    def batch_size(self) -> int:
        """Requests of every batch; 0 if that is free."""
        return 0 if self.last_page_len is None else self.last_page_len.shape[0]

    def keys(
        self,
        table: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        page_size: int,
        device: torch.device,
        block_tables: torch.Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> Keys:
        """The page table as Pageant reads it; with graphs also copied into the buffers.

        Args:
            table: indptr, indices and last_page_len.
            page_size: tokens a page.
            device: where it is needed.
            block_tables: the same pages as int [R, W]; then W bounds the table.
            in_place: the buffers hold it already.
        """
        if in_place and self.indptr is not None:
            assert self.indices is not None and self.last_page_len is not None  # noqa: PT018
            table = self.indptr, self.indices, self.last_page_len
        indptr, indices, last = table
        width = None if block_tables is None else block_tables.shape[1]
        if self.indptr is not None and self.indices is not None and self.last_page_len is not None:
            if last.shape[0] != self.batch_size:
                have = f"a batch of {last.shape[0]}"
                raise ValueError(f"{have}; allowed with CUDA graphs: {self.batch_size}")
            if indices.shape[0] > self.indices.shape[0]:
                have = f"indices has {indices.shape[0]} entries"
                raise ValueError(f"{have}; allowed: {self.indices.shape[0]}, as the buffer")
            width = self.indices.shape[0] if width is None else width
            if not in_place:
                self.indptr.copy_(indptr, non_blocking=True)
                self.indices[: indices.shape[0]].copy_(indices, non_blocking=True)
                self.last_page_len.copy_(last, non_blocking=True)
        keys = _lengths.pages(indptr, indices, last, page_size, device, width)
        return keys if block_tables is None else keys.over(block_tables)


class Wrapper:
    """A wrapper's workspace, layout and what it was planned with.

    Args:
        float_workspace_buffer: only its device counts; Pageant allocates its own workspace.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: keep what runs read in the same memory.
        backend: remembered; Pageant chooses its own kernels.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
    ) -> None:
        self._kv_layout = check_layout(kv_layout)
        self.reset_workspace_buffer(float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._backend = backend
        self._use_cuda_graph = use_cuda_graph
        self._runner = Runner(self.device, keeps_addresses=use_cuda_graph)
        self._window_left, self._logits_soft_cap = -1, 0.0
        self._sm_scale: float | None = None
        self._causal = True
        self._pos_encoding_mode = "NONE"

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As given to the constructor."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor | None = None,
    ) -> None:
        """Take other workspaces; only their alignment is looked at."""
        if float_workspace_buffer.element_size() != 1 or float_workspace_buffer.data_ptr() % 16:
            have = f"{float_workspace_buffer.dtype}, {float_workspace_buffer.data_ptr() % 16} bytes"
            allowed = "one-byte elements from a multiple of 16 bytes on"
            raise ValueError(f"float_workspace_buffer is {have} past 16's; allowed: {allowed}")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def plan(self, *args: Any, **others: Any) -> None:
        """Prepare for a batch; each class has its own arguments."""
        raise NotImplementedError

    def workspace_size(self, *args: Any, **others: Any) -> tuple[int, int]:
        """Bytes of the two workspaces that such a plan needs: a few, to say which device it is."""
        inspect.signature(self.plan).bind(*args, **others)
        return LEAST_BYTES, LEAST_BYTES

    def run(self, *args: Any, **others: Any) -> Result:
        """Attention of one layer; each class has its own arguments."""
        raise NotImplementedError

    def run_return_lse(self, *args: Any, **others: Any) -> Result:
        """`run` with return_lse."""
        return self.run(*args, **others, return_lse=True)

    def forward(self, *args: Any, **others: Any) -> Result:
        """Deprecated: `run`; what belongs to a plan is not taken here."""
        return self.run(*args, **others)

    def forward_return_lse(self, *args: Any, **others: Any) -> Result:
        """Deprecated: `run` with return_lse."""
        return self.run(*args, **others, return_lse=True)

    def end_forward(self) -> None:
        """Deprecated; lets go of caches that runs have seen."""
        self._runner.forget()

    @property
    def step(self) -> Step | None:
        """What was planned last."""
        return self._runner.step

    def _setting(  # budget: what every plan of FlashInfer says
        self,
        heads: tuple[int, int],
        dims: tuple[int, int | None],
        dtypes: tuple[DType | None, DType | None, DType | None],
        *,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rotates: bool = False,
    ) -> Setting:
        """What a plan says, noted in the attributes that hosts read.

        Args:
            heads: query heads, key/value heads.
            dims: head sizes of queries and values; None: the same.
            dtypes: of queries, keys and outputs; None: as queries.
            causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale: as in plan.
            rotates: whether the wrapper applies RoPE itself.
        """
        self._window_left, self._logits_soft_cap = window_left, logits_soft_cap or 0.0
        self._sm_scale, self._causal = sm_scale, causal
        self._pos_encoding_mode = pos_encoding_mode
        q_dtype = dtype_of(dtypes[0] or "float16")
        return Setting(
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dims[0],
            v_head_dim=dims[0] if dims[1] is None else dims[1],
            q_dtype=q_dtype,
            kv_dtype=dtype_of(dtypes[1] or q_dtype),
            out_dtype=dtype_of(dtypes[2] or q_dtype),
            scale=scale_of(sm_scale, dims[0]),
            window=window_of(window_left),
            soft_cap=cap_of(logits_soft_cap),
            alibi=pos_encoding_mode == "ALIBI" if rotates else check_no_rope(pos_encoding_mode),
            causal=causal,
        )

    def _check_window(self, window_left: int | None) -> None:
        if window_left is not None and window_left != self._window_left:
            allowed = f"{self._window_left}, as planned"
            raise AssertionError(f"window_left is {window_left}; allowed: {allowed}")
