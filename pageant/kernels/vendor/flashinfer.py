"""FlashInfer's kernels for the five FlashInfer rows: native, sinks, ranks, XQA, trtllm-gen.

FlashInfer's wrappers plan on the host, once a step for each window and soft cap, and keep what they
planned until the next step (`HostWork.step`); XQA and trtllm-gen read lengths and the page table on
the device. Each part of this file names which of FlashInfer's calls it makes; all of them are bound
to FlashInfer's own signatures by a test.

Limits: see ``pageant.kernels.vendor.common``. No CUDA graph may hold the native kernels: the
wrappers plan in the first `run` of a step.
"""

from __future__ import annotations

from pageant.kernels.call import AttentionCall
from pageant.kernels.vendor import flashinfer_native as native
from pageant.kernels.vendor import flashinfer_ranks as ranks
from pageant.kernels.vendor import flashinfer_table as table


def native_decode(call: AttentionCall) -> None:
    """One new token a request, on one rank or several."""
    if call.shard.world > 1 and call.params.window is not None:
        ranks.run(call)  # each rank sees another number of keys in the window
    else:
        native.decode(call)


def native_prefill(call: AttentionCall) -> None:
    """Many new tokens."""
    native.prefill(call)


def native_sink(call: AttentionCall) -> None:
    """Many new tokens, with attention sinks where the layer has them."""
    if call.params.sinks is None:
        native.prefill(call)
    else:
        native.prefill_with_sinks(call)


def native_on_ranks(call: AttentionCall) -> None:
    """Many new tokens over the keys that this rank holds."""
    ranks.run(call)


def xqa(call: AttentionCall) -> None:
    """A few new tokens, drafts among them."""
    table.xqa(call)


def trtllm_decode(call: AttentionCall) -> None:
    """A few new tokens on datacentre Blackwell."""
    table.trtllm_decode(call)


def trtllm_prefill(call: AttentionCall) -> None:
    """Many new tokens on datacentre Blackwell."""
    table.trtllm_prefill(call)
