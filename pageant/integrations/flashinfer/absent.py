"""What FlashInfer has and this stand-in does not, and why: raised from here, and shown in the docs.

Names can be imported, since hosts import more than they use; calling one raises.
"""

from __future__ import annotations

from typing import NoReturn

NOT_ATTENTION = "Not attention over a cache; it stays FlashInfer's, or torch's."
NO_MLA = "Multi-head latent attention is not in Pageant yet."

# Names of the package.
NAMES: dict[str, str] = {
    "BatchMLAPagedAttentionWrapper": NO_MLA,
    "append_paged_mla_kv_cache": NO_MLA,
    "trtllm_batch_decode_with_kv_cache_mla": NO_MLA,
    "xqa_batch_decode_with_kv_cache_mla": NO_MLA,
    "trtllm_ragged_attention_deepseek": NO_MLA,
    "SegmentGEMMWrapper": NOT_ATTENTION,
    "apply_llama31_rope": NOT_ATTENTION,
    "apply_rope": NOT_ATTENTION,
    "apply_rope_with_cos_sin_cache": NOT_ATTENTION,
    "bmm_fp8": NOT_ATTENTION,
    "chain_speculative_sampling": NOT_ATTENTION,
    "fused_add_rmsnorm": NOT_ATTENTION,
    "gemma_rmsnorm": NOT_ATTENTION,
    "gelu_and_mul": NOT_ATTENTION,
    "rmsnorm": NOT_ATTENTION,
    "sampling_from_probs": NOT_ATTENTION,
    "silu_and_mul": NOT_ATTENTION,
    "top_k_top_p_sampling_from_probs": NOT_ATTENTION,
}

# Arguments of what is there.
OPTIONS: dict[str, str] = {
    "jit_args": (
        "Kernels of the caller's own, and more positional arguments of run for them. Sinks "
        "(AttentionSink), soft cap, ALiBi and windows are built in."
    ),
    "pos_encoding_mode='ROPE_LLAMA' over pages": (
        "Every run would copy and rotate all cached keys. Apply RoPE before keys are appended, and "
        "use 'NONE'. Rows of keys are rotated, nvfp4 ones excepted."
    ),
    "pos_encoding_mode or causal over blocks": (
        "A block sparse row knows which keys it sees, not where they stand. Say it with the mask."
    ),
    "custom_mask with ALiBi": (
        "Unless rows see all keys before the new tokens: a row becomes a list of the keys it sees, "
        "which have no positions."
    ),
    "packed_custom_mask with lengths on a GPU": (
        "Where each request's bits begin would have to be waited for. Give custom_mask, or lengths "
        "on the CPU."
    ),
    "multi-item scoring": (
        "prefix_len_ptr, token_pos_in_items_ptr and max_item_len_ptr: Pageant has no such mask. "
        "Give custom_mask."
    ),
    "window_left or pos_encoding_mode over several levels": (
        "A level of MultiLevelCascadeAttentionWrapper does not know how many keys the levels after "
        "it hold; FlashInfer answers as if there were none."
    ),
    "window_right": "Windows of Pageant are open to the right, or causal.",
    "q_len_per_req above 1 with backend='fa3'": "As in FlashInfer; 'fa2' and 'auto' take it.",
    "use_cuda_graph over rows of keys": (
        "Which row is whose changes with every plan, and graphs hold the table's width. Use the "
        "paged wrapper with pages of one token."
    ),
    "v_indptr, o_indptr": "Rows of keys and values go together, and so do those of q and out.",
    "o_scale of the ragged wrapper": "Its output is not quantised. Multiply it yourself.",
    "skip_softmax_threshold_scale_factor, uses_spcompress": "Pageant leaves out no key.",
    "v_scale per head with quantised output": "Quantised output has one scale for all heads.",
    "a cache whose dimension 1 is 1": "Keys and values in one place, as MLA has them.",
    "uses_shared_paged_kv_idx=False": "Keys and values of a token lie on pages of one number.",
    "enable_block_sparse_attention": "Use BlockSparseAttentionWrapper.",
    "causal=False with a window": "trtllm_batch_context_with_kv_cache: FlashInfer refuses it too.",
    "use_profiler": "Pageant's kernels write no profile.",
    "options of POD's decode batch in run": "plan() has said them already.",
}


def refuse(what: str, detail: str = "") -> NoReturn:
    """Raise what the table says of an option.

    >>> refuse("use_profiler")
    Traceback (most recent call last):
    NotImplementedError: use_profiler: Pageant's kernels write no profile.
    """
    raise NotImplementedError(f"{what}{detail}: {OPTIONS[what]}")


def refuse_jit(given: object) -> None:
    """Raise for what only a kernel of the caller's own would take."""
    if given:
        refuse("jit_args")


def refuse_skipping(threshold: object) -> None:
    """Raise for softmax that leaves out small weights."""
    if threshold is not None:
        refuse("skip_softmax_threshold_scale_factor, uses_spcompress")


class AbsentName:
    """A name that can be imported but not used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **others: object) -> NoReturn:
        """Raise what the table says of the name."""
        raise NotImplementedError(f"{self.name}: {NAMES[self.name]}")

    def __repr__(self) -> str:
        return f"<absent: {self.name}>"


def table() -> str:
    """The list as the docs show it.

    >>> print(table().splitlines()[2])
    | `BatchMLAPagedAttentionWrapper` | Multi-head latent attention is not in Pageant yet. |
    """
    rows = [("Absent", "Why"), ("---", "---")]
    rows += [(f"`{name}`", why) for name, why in NAMES.items()]
    rows += list(OPTIONS.items())
    return "\n".join(f"| {what} | {why} |" for what, why in rows) + "\n"
