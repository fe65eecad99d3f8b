import itertools
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES, Device
from pageant.select.built import is_built, missing_here, never_missing
from pageant.select.choose import asked_rows, choose, choose_each, has_kernels, load
from pageant.select.explain import explain
from pageant.select.needs import Need, needs_of
from pageant.select.questions import FLASHINFER_QUESTIONS, QUESTIONS, configuration
from pageant.select.row import PHASES, Phase, Row, Sizes
from pageant.select.rows import NAMES, OWNERS, ROWS
from pageant.select.words import FEATURES, FIELDS
from pageant.types import CacheSpec, Features, Options
from tests.select.configs import SHAPE, Config, configs

APART = ("decode", "flashinfer.trtllm-gen")
TEST_ROW = next(row for row in ROWS if row.name == "cpu.decode")  # one that is built


@given(config=configs(), family=st.sampled_from(list(FAMILIES)))
def test_first_row_that_serves_every_need_wins(config: Config, family: str) -> None:
    needs = needs_of(*config, FAMILIES[family])
    event(f"{sum(need.field == 'features' for need in needs)} features")
    for choice in choose_each(*config, FAMILIES[family]):
        rows = asked_rows(choice.phase, config[3].kernels, family)
        runs = [
            all(need.served_by(row) for need in needs) and missing_here(row) is None for row in rows
        ]
        assert (choice.row is not None) == any(runs)
        before = rows[: runs.index(True)] if any(runs) else rows
        assert choice.row is None or choice.row is rows[runs.index(True)]
        assert [refusal.kernel for refusal in choice.refused] == [row.name for row in before]


@given(config=configs(), family=st.sampled_from(list(FAMILIES)))
def test_short_answer_is_that_of_the_long_one(config: Config, family: str) -> None:
    needs, kernels = needs_of(*config, FAMILIES[family]), config[3].kernels
    for missing in (missing_here, never_missing):
        choices = [choose(needs, phase, kernels, missing=missing) for phase in PHASES]
        assert has_kernels(needs, kernels, missing) == all(choice.row for choice in choices)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("phase", PHASES)
def test_kernels_option_leaves_rows_out_and_keeps_their_order(phase: Phase, family: str) -> None:
    order = list(dict.fromkeys(row.name for row in ROWS if phase in row.phases))
    for kernels in (*OWNERS, *NAMES):
        names = [row.name for row in asked_rows(phase, kernels, family)]
        assert names == sorted(set(names), key=order.index)
        assert kernels not in names or names == [kernels]
        if kernels in OWNERS and kernels != "auto":
            assert {row.owner for row in asked_rows(phase, kernels, family)} == {kernels}
    owners = {row.owner for row in asked_rows(phase, "auto", family)}
    assert ("flashinfer" in owners) == (family in ("sm100", "sm103"))


def nothing_missing(row: Row) -> None:
    """Every kernel exists, and FlashInfer is installed."""


def test_flashinfer_has_both_phases_or_neither() -> None:
    """It decodes with lse and quantised output, but has no prefill for them."""
    config = (
        SHAPE,
        CacheSpec(format="fp8"),
        Features(lse=True, out_formats=("model", "fp8_e4m3")),
        Options(),
        FAMILIES["sm100"],
    )
    answer = explain(*config, missing=nothing_missing)
    assert {row.owner for row in answer.rows.values()} == {"pageant"}
    (why,) = (r.why for r in answer.refused if (r.phase, r.kernel) == APART)
    assert why == "needs a plan of its own; would run if it served both phases"


def test_every_row_is_reachable() -> None:
    reached = set()
    for question in (*QUESTIONS.values(), *FLASHINFER_QUESTIONS.values()):
        formats = ("bf16", "int8", "nvfp4")
        for fmt, kernels, device in itertools.product(
            formats, ("auto", "flashinfer"), FAMILIES.values()
        ):
            config = configuration(fmt, question, kernels=kernels)
            for missing in (missing_here, nothing_missing):
                reached |= {*explain(*config, device, missing=missing).rows.values()}
    assert reached == set(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_kernel_resolves(row: Row) -> None:
    module, _, function = row.kernel.partition(":")
    assert module.startswith("pageant.kernels.")
    assert function.isidentifier()
    if is_built(row):
        assert callable(load(row))
    else:
        with pytest.raises(ModuleNotFoundError):
            load(row)


def test_kernels_that_serve_today_are_built() -> None:
    assert {row.name for row in ROWS if is_built(row)} >= {
        "cpu.decode",
        "cpu.prefill",
        "reference.attention",
    }


def test_names_are_no_owners_and_rows_of_one_name_do_not_overlap() -> None:
    assert not set(NAMES) & set(OWNERS)
    places = [(row.name, phase, f) for row in ROWS for phase in row.phases for f in row.families]
    assert len(set(places)) == len(places)


def test_rows_list_only_what_there_are_words_for() -> None:
    for row in ROWS:
        assert row.features <= set(FEATURES)
        assert {need for rule in row.queries for need in rule.needs | rule.unless} <= set(FEATURES)
        assert set(row.formats) <= set(FORMATS)
        assert set(row.families) <= set(FAMILIES)


@pytest.mark.parametrize("feature", FEATURES)
def test_refusal_names_the_feature_and_the_cure(feature: str) -> None:
    row = replace(TEST_ROW, features=frozenset(FEATURES) - {feature})
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
    row = replace(TEST_ROW, **{field: served})
    (refusal,) = choose([Need(field, value)], "decode", rows=(row,)).refused
    assert refusal.why == f"serves no {lacking}; would run {cure}"
    assert refusal.argument == FIELDS[field].argument


def test_one_sentence_names_every_need() -> None:
    needs = [Need("families", "sm90"), Need("features", "invariant")]
    refusal = choose(needs, "decode", rows=(TEST_ROW,)).refused[0]
    assert refusal.arguments == ("sm", "invariant")
    assert refusal.kind == "elsewhere"
    assert refusal.why == (
        "serves no device of this family and no invariant mode; "
        "would run on cpu and with invariant off"
    )


def test_row_that_is_not_built_says_so_once_it_serves_everything() -> None:
    row = replace(TEST_ROW, kernel="pageant.kernels.moon.decode:run")
    (refusal,) = choose([], "decode", rows=(row,)).refused
    assert refusal.why == "is not built yet; would run once pageant.kernels.moon.decode exists"
    assert (refusal.arguments, refusal.kind) == (("kernels",), "missing")
    (refusal,) = choose([Need("features", "invariant")], "decode", rows=(row,)).refused
    assert (refusal.arguments, refusal.kind) == (("invariant",), "lacks")


def test_row_whose_package_is_not_installed_says_how_to_get_it() -> None:
    row = replace(TEST_ROW, packages=("torch", "flashinfer_of_the_moon"))
    (refusal,) = choose([], "decode", rows=(row,)).refused
    assert refusal.why == (
        "needs flashinfer_of_the_moon, which is not installed; "
        "would run after `pip install flashinfer_of_the_moon`"
    )
    assert choose([], "decode", rows=(replace(row, packages=("torch",)),)).row is not None


def test_kernels_of_several_devices_are_refused_once_and_name_all() -> None:
    refused = choose([Need("families", "cpu")], "decode", "triton.decode").refused
    assert [refusal.kernel for refusal in refused] == ["triton.decode"]
    assert "on sm75, sm80, sm86" in refused[0].why


def test_closest_is_the_one_that_costs_least() -> None:
    def argument(*names: str) -> str | None:
        needs = [Need("families", "sm90"), *(Need("features", name) for name in names)]
        return choose(needs, "decode", "flashinfer", missing=never_missing).support.argument

    assert argument("sinks", "soft_cap") == "soft_cap"
    assert argument("sinks", "alibi") == "alibi"
    assert argument("sinks", "no_cubins") == "sinks"
    assert argument("sinks", "soft_cap", "alibi") == "soft_cap"


def test_undeclared_need_is_refused_by_every_row() -> None:
    for kernels in OWNERS:
        choice = choose([Need("features", "time_travel")], "decode", kernels)
        assert choice.row is None
        assert {refusal.argument for refusal in choice.refused} == {"time_travel"}


def test_need_of_no_field_is_a_bug_not_a_refusal() -> None:
    with pytest.raises(AttributeError):
        choose([Need("moon_phase", "full")], "decode")


def test_order_decides_between_two_that_serve() -> None:
    other = replace(TEST_ROW, name="other")
    assert choose([], "decode", rows=(TEST_ROW, other)).row is TEST_ROW
    assert choose([], "decode", rows=(other, TEST_ROW)).row is other


@pytest.mark.parametrize(
    ("kernels", "family", "prefill", "decode"),
    [
        ("auto", "cpu", "cpu.prefill", "cpu.decode"),
        ("auto", "sm90", "triton.prefill", "triton.decode"),
        ("pageant", "cpu", "cpu.prefill", "cpu.decode"),
        ("pageant", "sm90", "triton.prefill", "triton.decode"),
        ("reference", "cpu", "reference.attention", "reference.attention"),
        ("flashinfer", "sm90", None, None),
        ("cpu.decode", "cpu", "cpu.prefill", "cpu.decode"),
        ("cpu.prefill", "cpu", "cpu.prefill", "cpu.decode"),
        ("cpu.decode", "sm90", "triton.prefill", None),
        ("flashinfer.xqa", "sm90", "triton.prefill", None),
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
