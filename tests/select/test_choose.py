from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES, Device
from pageant.select.choose import choose, choose_each, load
from pageant.select.explain import explain
from pageant.select.needs import FEATURES, FIELDS, Need, needs_of
from pageant.select.rows import OWNERS, PHASES, ROWS, Phase, Row, Sizes
from pageant.select.validate import check_config
from pageant.types import CacheSpec, Features, Options
from tests.select.configs import SHAPE, Config, configs, grid


@given(config=configs(), family=st.sampled_from(list(FAMILIES)))
def test_first_row_that_serves_every_need_wins(config: Config, family: str) -> None:
    needs = needs_of(*config, FAMILIES[family])
    event(f"{sum(need.field == 'features' for need in needs)} features")
    for choice in choose_each(*config, FAMILIES[family]):
        rows = [row for row in ROWS if choice.phase in row.phases]
        served = [all(need.served_by(row) for need in needs) for row in rows]
        if choice.row is not None:
            assert served[rows.index(choice.row)]
            rows = rows[: rows.index(choice.row)]
        assert [refusal.kernel for refusal in choice.refused] == [row.name for row in rows]
        for refusal, is_served in zip(choice.refused, served, strict=False):
            assert is_served <= (refusal.argument == "kernels")


def test_every_row_is_reachable() -> None:
    reached = {
        row.name
        for config in grid(head_dims=(64,))
        if check_config(*config).ok
        for device in FAMILIES.values()
        for row in explain(*config, device=device).rows.values()
        if config[3].kernels == "auto"
    }
    assert reached == {row.name for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_kernel_resolves(row: Row) -> None:
    assert callable(load(row))


def test_names_of_rows_are_unique_and_no_owners() -> None:
    names = [*OWNERS, *(row.name for row in ROWS)]
    assert len(set(names)) == len(names)


def test_rows_list_only_what_there_are_words_for() -> None:
    for row in ROWS:
        assert row.features <= set(FEATURES)
        assert set(row.formats) <= set(FORMATS)
        assert set(row.families) <= set(FAMILIES)


@pytest.mark.parametrize("feature", FEATURES)
def test_refusal_names_the_feature_and_the_cure(feature: str) -> None:
    row = replace(ROWS[0], features=frozenset(FEATURES) - {feature})
    (refusal,) = choose([Need("features", feature)], "decode", rows=(row,)).refused
    words = FEATURES[feature]
    assert refusal.why == f"serves no {words.lacking}; would run {words.cure}"
    assert refusal.argument == words.argument


@pytest.mark.parametrize(
    ("field", "served", "value", "lacking", "cure"),
    [
        ("families", ("cpu",), "sm90", "device of this family", "on cpu"),
        ("dtypes", ("float16",), "float32", "float32 models", "with dtype float16"),
        ("formats", ("fp16", "bf16"), "fp32", "fp32 cache", "with cache fp16 or bf16"),
        ("head_dims", Sizes(64, 128), 32, "head size 32", "with head sizes 64 to 128"),
        ("page_sizes", (16,), 1, "pages of 1 tokens", "with page_size 16"),
        ("layouts", ("LBHNC",), "BLHNC", "layout BLHNC", "with layout LBHNC"),
        ("out_formats", ("model",), "nvfp4", "nvfp4 output", "with out_formats model"),
    ],
)
def test_refusal_names_the_value_and_those_served(
    field: str, served: object, value: object, lacking: str, cure: str
) -> None:
    row = replace(ROWS[0], **{field: served})
    (refusal,) = choose([Need(field, value)], "decode", rows=(row,)).refused
    assert refusal.why == f"serves no {lacking}; would run {cure}"
    assert refusal.argument == FIELDS[field].argument


def test_one_sentence_names_every_need() -> None:
    needs = [Need("families", "sm90"), Need("features", "invariant")]
    refusal = choose(needs, "decode").refused[0]
    assert refusal.arguments == ("sm", "invariant")
    assert refusal.why == (
        "serves no device of this family and no invariant mode; "
        "would run on cpu and with invariant off"
    )


def test_undeclared_need_is_refused_by_every_row() -> None:
    choice = choose([Need("features", "time_travel")], "decode")
    assert choice.row is None
    assert {refusal.argument for refusal in choice.refused} == {"time_travel"}


def test_need_of_no_field_is_a_bug_not_a_refusal() -> None:
    with pytest.raises(AttributeError):
        choose([Need("moon_phase", "full")], "decode")


def test_order_decides_between_two_that_serve() -> None:
    assert choose([], "decode").row is ROWS[0]
    assert choose([], "decode", rows=ROWS[::-1]).row is ROWS[-1]


@pytest.mark.parametrize(
    ("kernels", "family", "prefill", "decode"),
    [
        ("auto", "cpu", "cpu.prefill", "cpu.decode"),
        ("auto", "sm90", "reference.attention", "reference.attention"),
        ("pageant", "cpu", "cpu.prefill", "cpu.decode"),
        ("pageant", "sm90", None, None),
        ("reference", "cpu", "reference.attention", "reference.attention"),
        ("flashinfer", "sm90", None, None),
        ("cpu.decode", "cpu", "cpu.prefill", "cpu.decode"),
        ("cpu.prefill", "cpu", "cpu.prefill", "cpu.decode"),
        ("cpu.decode", "sm90", "reference.attention", None),
        ("reference.attention", "cpu", "reference.attention", "reference.attention"),
    ],
)
def test_kernels_option(kernels: str, family: str, prefill: str | None, decode: str | None) -> None:
    options = Options(kernels=kernels)
    choices = choose_each(SHAPE, CacheSpec(), Features(), options, Device.of(family))
    assert [choice.row and choice.row.name for choice in choices] == [prefill, decode]


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_of_a_plain_model_has_a_kernel_everywhere(phase: Phase) -> None:
    for device in FAMILIES.values():
        needs = needs_of(SHAPE, CacheSpec(), Features(), Options(), device)
        assert choose(needs, phase).row is not None
