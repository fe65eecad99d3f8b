from dataclasses import replace

import pytest

from pageant.select.explain import missing_in
from pageant.select.groups import Group, GroupsExplanation, explain_groups
from pageant.types import ArgumentError, CacheSpec, ContextParallel, Features, Options, Shape

NARROW = Group(shape=Shape(num_q_heads=16, num_kv_heads=8, head_dim=256))
WIDE = Group(shape=Shape(num_q_heads=16, num_kv_heads=2, head_dim=512))
OPTIONS = Options(kernels="flashinfer", speculative_tokens=3, adaptive=True)


def ask(sm: str, *groups: Group, options: Options = OPTIONS) -> GroupsExplanation:
    return explain_groups(groups, options, sm, missing=missing_in("flashinfer"))


def test_each_group_has_kernels_of_its_own_and_a_host_the_least_of_them() -> None:
    answer = ask("90", NARROW, WIDE)
    decodes = [group.rows["decode"].name for group in answer.groups]
    assert decodes == ["flashinfer.xqa", "flashinfer.native"]
    assert [group.decode_threshold for group in answer.groups] == [4, 1]
    assert answer.decode_threshold == 1
    assert answer.cuda_graph == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert ask("90", NARROW, NARROW).cuda_graph == "UNIFORM_BATCH"
    assert not answer.draft_reuse
    assert not answer.lens_mismatch


def test_groups_that_agree() -> None:
    answer = ask("100", NARROW, WIDE)
    assert answer.varlen_graph_max_q == answer.decode_threshold == 4
    assert answer.draft_reuse
    assert answer.lens_mismatch
    capped = replace(WIDE, features=Features(soft_cap=True))
    assert ask("100", NARROW, capped).varlen_graph_max_q is None


def test_unquantised_layers_beside_fp8_ones() -> None:
    answer = ask("100", replace(NARROW, cache=CacheSpec(format="fp8")), NARROW)
    assert [group.query_dtypes["decode"] for group in answer.groups] == [
        "float8_e4m3fn",
        "bfloat16",
    ]


def test_group_that_is_not_on_ranks() -> None:
    options = replace(OPTIONS, context_parallel=ContextParallel(rank=0, world=2))
    answer = ask("100", NARROW, replace(NARROW, on_ranks=False), options=options)
    prefills = [group.rows["prefill"].name for group in answer.groups]
    assert prefills == ["flashinfer.native-dcp", "flashinfer.trtllm-gen"]


def test_group_that_cannot_run_is_named() -> None:
    answer = ask("90", NARROW, replace(WIDE, features=Features(sinks=True)))
    assert answer.support.argument == "sinks"
    assert (answer.support.reason or "").startswith("group 1: no decode kernel: flashinfer.native")
    assert ask("90", NARROW).support


def test_text_has_a_part_for_each_group() -> None:
    parts = str(ask("90", NARROW, WIDE)).split("device  sm90")
    assert len(parts) == 3
    assert "head size 256" in parts[1]
    assert "head size 512" in parts[2]


def test_no_groups_are_a_mistake() -> None:
    with pytest.raises(ArgumentError, match="one or more"):
        explain_groups([])
