"""Cases that vLLM's own tests of its decode kernels think of: scales and draft masks, by number."""

import pytest
import torch

import pageant
from pageant import Batch, Features, Layer, Shape
from pageant.cache.formats import FORMATS
from pageant.plan.inputs import resolve_layer

SHAPE = Shape(num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("q_dtype", "cache", "score", "value"),
    [
        (torch.bfloat16, "bf16", 0.5, 1.0),
        (torch.bfloat16, "fp8_e4m3", 0.5 * 3.0, 4.0),
        (torch.float8_e4m3fn, "fp8_e4m3", 0.5 * 2.0 * 3.0, 4.0),
        (torch.float8_e4m3fn, "bf16", 0.5 * 2.0, 1.0),
        (torch.bfloat16, "int8", 0.5, 1.0),
    ],
)
def test_scales_count_where_something_is_quantised(
    q_dtype: torch.dtype, cache: str, score: float, value: float
) -> None:
    """q_scale only for a quantised query, k_scale and v_scale only for a cache that has them."""
    layer = Layer(scale=0.5, q_scale=2.0, k_scale=3.0, v_scale=4.0)
    q = torch.zeros(1, 4, 32).to(q_dtype)
    params = resolve_layer(layer, Features(), SHAPE, FORMATS[cache], q)
    assert (params.score_scale, params.value_scale) == (score, value)


def planned(lens: list[int], **changes: object) -> pageant.Plan:
    attn = pageant.Attention(
        SHAPE,
        limits=pageant.Limits(max_requests=4, max_tokens=64, max_seq_len=128),
        features=Features(draft_masks=True, non_causal=True),
        options=pageant.Options(speculative_tokens=20),
    )
    keys = [40 + m for m in lens]
    table = [[4 * row + page for page in range(4)] for row in range(len(lens))]
    return attn.plan(Batch.from_lengths(lens, keys, table, 16, **changes))


def test_causal_words_of_uniform_drafts() -> None:
    mask = planned([3, 3]).packed_draft_mask
    assert mask.dtype == torch.uint16
    assert mask[..., 0].tolist() == [[0b001, 0b011, 0b111]] * 2
    assert not mask[..., 1:].any()


def test_words_of_drafts_that_see_each_other() -> None:
    mask = planned([3, 3], causal=False).packed_draft_mask
    assert mask[..., 0].tolist() == [[0b111] * 3] * 2


def test_words_of_ragged_drafts_lie_one_request_after_another() -> None:
    mask = planned([3, 1, 2]).packed_draft_mask
    assert mask[:, 0].tolist() == [0b001, 0b011, 0b111, 0b001, 0b001, 0b011]


def test_drafts_of_more_than_one_word() -> None:
    mask = planned([20]).packed_draft_mask.to(torch.int32)
    assert mask[0, :, 0].tolist() == [min(2 ** (row + 1), 2**16) - 1 for row in range(20)]
    assert mask[0, :, 1].tolist() == [2 ** max(row - 15, 0) - 1 for row in range(20)]


def test_words_of_a_tree() -> None:
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32)
    mask = planned([4], draft_parents=parents).packed_draft_mask
    assert mask.flatten(0, -2)[:, 0].tolist() == [0b0001, 0b0011, 0b0101, 0b1101]


def test_one_token_needs_no_mask() -> None:
    assert planned([1, 1]).packed_draft_mask is None
