from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageant.select.validate import check_config, check_limits
from pageant.types import CacheSpec, ContextParallel, Features, Limits, Options
from tests.select.configs import PARTS, SHAPE, WRONG


@pytest.mark.parametrize(("part", "field", "value", "argument"), WRONG)
def test_wrong_value_names_itself_and_what_is_allowed(
    part: str, field: str, value: Any, argument: str
) -> None:
    verdict = check_config(**{**PARTS, part: replace(PARTS[part], **{field: value})})
    assert not verdict.ok
    assert verdict.argument == argument
    assert verdict.reason
    said, _, allowed = verdict.reason.partition("; allowed: ")
    assert allowed
    assert " is " in said
    assert "\n" not in verdict.reason


@pytest.mark.parametrize("part", PARTS)
def test_part_of_another_type_is_named(part: str) -> None:
    verdict = check_config(**{**PARTS, part: "auto"})
    assert (verdict.ok, verdict.argument) == (False, part)


@pytest.mark.parametrize("head_dim", range(16, 513, 8))
def test_every_head_size_is_valid(head_dim: int) -> None:
    shape = replace(SHAPE, head_dim=head_dim, v_head_dim=528 - head_dim)
    assert check_config(shape).ok


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 528, 2**20])
def test_every_page_size_is_valid(page_size: int) -> None:
    assert check_config(SHAPE, CacheSpec(page_size=page_size)).ok


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 16, 64])
def test_every_group_size_is_valid(group: int) -> None:
    assert check_config(replace(SHAPE, num_q_heads=2 * group)).ok


def test_everything_at_once_is_valid() -> None:
    features = Features(
        windows=(None, 1, 128, 128), soft_cap=True, sinks=True, alibi=True, draft_masks=True
    )
    ranks = ContextParallel(rank=1, world=2, interleave=4, comm="a2a")
    options = Options(kernels="cpu.decode", debug_splits=3, context_parallel=ranks)
    assert check_config(SHAPE, CacheSpec(format="fp8", layout="BHLNC"), features, options).ok


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 600), st.floats(), st.text(max_size=4), st.tuples()
)
FIELDS = [(part, field) for part, value in PARTS.items() for field in vars(value)]


@given(part_and_field=st.sampled_from(FIELDS), value=JUNK | st.lists(JUNK, max_size=2))
def test_junk_is_answered_and_never_raises(part_and_field: tuple[str, str], value: Any) -> None:
    part, field = part_and_field
    verdict = check_config(**{**PARTS, part: replace(PARTS[part], **{field: value})})
    assert verdict.ok == (verdict.reason is None) == (verdict.argument is None)


@pytest.mark.parametrize("name", ["max_requests", "max_tokens", "max_seq_len", "max_cached_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8"])
def test_wrong_limit_is_named(name: str, value: Any) -> None:
    verdict = check_limits(replace(Limits(), **{name: value}))
    assert (verdict.ok, verdict.argument) == (False, name)


def test_right_limits() -> None:
    assert check_limits(Limits())
    assert check_limits(Limits(max_requests=1, max_tokens=1, max_seq_len=1, max_cached_tokens=1))
