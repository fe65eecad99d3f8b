"""Block sparse attention against a mask over everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pageant.integrations import flashinfer
from tests.integrations.flashinfer.scene import assert_near, attend, i32, workspace

SEEN = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()  # 3 x 4 blocks of 2 x 3


def rows(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", ["none", "plain", "packed"])
def test_blocks_of_one_size(mask: str) -> None:
    indptr, indices = i32(0, 3, 3, 4), i32(0, 2, 3, 1)
    q, k, v = rows(6, 4, 32), rows(12, 2, 32, seed=1), rows(12, 2, 32, seed=2)
    inner = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(3)) < 0.6
    whole = SEEN.repeat_interleave(2, 0).repeat_interleave(3, 1)
    options: dict[str, Any] = {}
    if mask != "none":
        at = 0
        for row in range(3):
            for column in SEEN[row].nonzero().flatten().tolist():
                whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3] = inner[at]
                at += 1
        options["mask"] = inner
    if mask == "packed":
        options = {"packed_mask": flashinfer.packbits(inner.flatten(), "little")}
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    wrapper.plan(
        indptr,
        indices,
        6,
        12,
        2,
        3,
        4,
        2,
        32,
        q_data_type="float32",
        o_data_type="float32",
        logits_soft_cap=5.0,
        **options,
    )
    got = wrapper.run(q, k, v, return_lse=True)
    assert_near(got, attend(q, k, v, mask=whole, cap=5.0))
    with pytest.raises(ValueError, match="k has"):
        wrapper.run(q, k[:9], v[:9])


def test_blocks_of_many_sizes_and_a_pattern_a_head() -> None:
    generator = torch.Generator().manual_seed(4)
    seen = torch.rand(2, 3, 4, generator=generator) < 0.5
    seen[0, 1] = False
    row_sizes = i32(1, 4, 2, 3, 3, 1).view(2, 3)
    column_sizes = i32(2, 0, 5, 3, 4, 3, 2, 1).view(2, 4)
    q, k, v = rows(4, 7, 32), rows(2, 10, 32, seed=1), rows(2, 10, 32, seed=2)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(seen, row_sizes, column_sizes, 4, 2, 32, q_data_type="float32")
    for _ in range(2):
        out, lse = wrapper.run(q, k, v, return_lse=True)
        for head in range(4):
            own = head // 2
            mask = seen[own].repeat_interleave(row_sizes[own], 0)
            mask = mask.repeat_interleave(column_sizes[own], 1)
            want = attend(q[head, :, None], k[own, :, None], v[own, :, None], mask=mask)
            assert_near((out[head], lse[head]), (want[0][:, 0], want[1][:, 0]))


def test_what_is_refused_says_why() -> None:
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    given = (i32(0, 1), i32(0), 2, 3, 2, 3, 4, 2, 32)
    with pytest.raises(NotImplementedError, match="blocks"):
        wrapper.plan(*given, causal=True)
    with pytest.raises(NotImplementedError, match="blocks"):
        wrapper.plan(*given, pos_encoding_mode="ALIBI")
    with pytest.raises(ValueError, match="multiples"):
        wrapper.plan(i32(0, 1), i32(0), 3, 3, 2, 3, 4, 2, 32)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(rows(2, 4, 32), rows(3, 2, 32), rows(3, 2, 32))
