import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from pageant import ArgumentError, Attention
from pageant.device import FAMILIES, Device
from pageant.select.choose import supports
from pageant.select.explain import explain
from pageant.select.row import PHASES
from pageant.select.validate import check_config
from pageant.types import CacheSpec, ContextParallel, Features, Limits, Options, Support
from tests.select.configs import SHAPE, Config, configs, configs_and_mistakes, grid


@given(config=configs(), family=st.sampled_from(list(FAMILIES)))
def test_supports_agrees_with_explain(config: Config, family: str) -> None:
    verdict, answer = supports(*config, device=family), explain(*config, device=family)
    assert check_config(*config).ok
    assert verdict == answer.support
    assert verdict.ok == (set(answer.rows) == set(PHASES))
    assert verdict.ok == answer.to_dict()["ok"]


def built(config: Config) -> Support:
    """What building an Attention on the CPU says."""
    shape, cache, features, options = config
    limits = Limits(max_requests=2, max_tokens=4, max_seq_len=32, max_cached_tokens=64)
    try:
        Attention(shape, cache, limits, features, options)
    except ArgumentError as error:
        return Support(False, str(error), error.argument)
    return Support(True)


def test_supports_agrees_with_construction() -> None:
    verdicts = []
    for config in grid():
        verdicts.append(supports(*config, "cpu"))
        assert verdicts[-1] == built(config)
    assert 0 < sum(map(bool, verdicts)) < len(verdicts)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "cpu"])
def test_supports_agrees_with_construction_on_every_device(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor stands in for a device of the family: all but the kernels is decided there."""
    monkeypatch.setattr(Device, "detect", lambda device: FAMILIES[family])
    verdicts = []
    for config in grid(head_dims=(64,)):
        verdicts.append(supports(*config, family))
        assert verdicts[-1] == built(config)
    assert 0 < sum(map(bool, verdicts)) < len(verdicts)


@pytest.mark.parametrize("world", [1, 2])
def test_parts_cannot_be_quantised(world: int) -> None:
    ranks = Options(context_parallel=ContextParallel(rank=0, world=world))
    for formats, options, ok in (
        (("fp8_e4m3",), ranks, False),
        (("nvfp4", "fp8_e4m3"), ranks, False),
        (("nvfp4", "model"), ranks, True),
        (("fp8_e4m3",), Options(), True),
    ):
        config = (SHAPE, CacheSpec(), Features(out_formats=formats), options)
        verdict = supports(*config, "cpu")
        assert verdict == built(config)
        assert verdict.ok == ok
        assert ok or verdict.argument == "out_formats"


@given(config=configs_and_mistakes())
def test_supports_agrees_with_construction_of_anything(config: Config) -> None:
    verdict = supports(*config, "cpu")
    event(f"argument {verdict.argument}")
    assert verdict == built(config)


@pytest.mark.parametrize(
    ("options", "family", "argument", "words"),
    [
        (Options(kernels="flashinfer"), "cpu", "sm", "flashinfer.native serves no device of this"),
        (Options(kernels="cpu.prefill"), "sm90", "sm", "cpu.prefill serves no device of this"),
        (Options(kernels="cpu.decode"), "sm90", "sm", "no decode kernel: cpu.decode"),
        (
            Options(invariant=True, kernels="reference"),
            "sm90",
            "invariant",
            "reference.attention serves no invariant",
        ),
    ],
)
def test_reason_is_that_of_the_row_that_came_closest(
    options: Options, family: str, argument: str, words: str
) -> None:
    verdict = supports(SHAPE, options=options, device=family)
    assert verdict.argument == argument
    assert words in (verdict.reason or "")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), Device.of("cpu"), "90", "sm121"])
def test_devices_by_any_name(device: Device | torch.device | str) -> None:
    assert supports(SHAPE, device=device)


@pytest.mark.parametrize(
    ("device", "argument"), [("sm77", "sm"), ("77", "sm"), ("tpu", "device"), ("meta", "device")]
)
def test_unknown_device_is_an_answer(device: str, argument: str) -> None:
    assert supports(SHAPE, device=device).argument == argument
