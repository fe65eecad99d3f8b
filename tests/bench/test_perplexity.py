"""Perplexity through the cache: transformers' own number, the reference's, and what must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pageant.bench.perplexity import BOUNDS, SAME, Measurement, Row, Text, broken, squared_errors
from pageant.cache.calibrate import Scales, calibrate
from pageant.cache.formats import FORMATS
from pageant.engine.model import load
from pageant.types import ArgumentError

WINDOWS = [[(7 * i + j * j) % 64 for i in range(25)] for j in range(3)] + [[1, 2, 3]]


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,  # so that attention matters
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def smollm2() -> Measurement:
    loaded = load("smollm2", torch.float32)
    return Measurement(loaded.model, Text.of(loaded.tokenizer, 48, 48, 32))


def likelihood(model: Any, windows: list[list[int]]) -> float:
    """Perplexity by transformers' own attention."""
    model.set_attn_implementation("eager")
    total = 0.0
    for window in windows:
        with torch.inference_mode():
            logits = model(torch.tensor([window[:-1]])).logits[0].double()
        chosen = logits.log_softmax(-1)[torch.arange(len(window) - 1), window[1:]]
        total -= float(chosen.sum())
    return math.exp(total / sum(len(window) - 1 for window in windows))


def test_perplexity_is_transformers_own(tiny: LlamaForCausalLM) -> None:
    expected = likelihood(tiny, WINDOWS)
    measurement = Measurement(tiny, Text(windows=WINDOWS, calibration=[]))
    found = measurement.row("fp32")
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    (by_reference,) = measurement.surprise("fp32", "reference")
    assert math.exp(by_reference.mean()) == pytest.approx(expected, rel=1e-5)
    assert (found.change, found.change_error) == (0, 0)
    assert (found.k_error, found.v_error, found.reference) == (0, 0, None)


def test_rows_of_all_formats(tiny: LlamaForCausalLM) -> None:
    measurement = Measurement(tiny, Text(windows=WINDOWS, calibration=WINDOWS[:1]))
    rows = {name: measurement.row(name, check=True) for name in FORMATS}
    for name, row in rows.items():
        assert row.difference is not None
        assert row.difference < SAME, name
        assert row.change == pytest.approx(100 * (row.perplexity / rows["fp32"].perplexity - 1))
    assert rows["fp8_e4m3"].bytes_per_token == 2 * 2 * 2 * 16  # layers, K and V, heads, D
    assert rows["bf16"].k_error < rows["fp8_e4m3"].k_error < rows["fp8_e5m2"].k_error
    assert rows["fp8_e4m3"].change != 0
    fp32, fp8 = (measurement.surprise(name)[0] for name in ("fp32", "fp8_e4m3"))
    deviation = float((fp8 - fp32).square().mean() - (fp8 - fp32).mean() ** 2) ** 0.5
    expected = pytest.approx(100 * deviation / len(fp8) ** 0.5)
    assert rows["fp8_e4m3"].change_error == expected
    assert len(fp8) == sum(len(window) - 1 for window in WINDOWS)


def test_scales_are_fitted_to_the_calibration(tiny: LlamaForCausalLM) -> None:
    fitted = Measurement(tiny, Text(windows=WINDOWS, calibration=WINDOWS[:2]), 99.0)
    assert [len(pairs) for pairs in fitted.seen] == [2, 2]
    expected = [calibrate(pairs, "fp8", 99.0) for pairs in fitted.seen]
    assert fitted.scales("fp8_e4m3") == expected != [Scales(), Scales()]
    plain = Measurement(tiny, Text(windows=WINDOWS, calibration=[]))
    assert plain.scales("fp8_e4m3") == [Scales(), Scales()]
    assert plain.row("fp8_e4m3").perplexity != fitted.row("fp8_e4m3").perplexity


def test_a_wrong_kernel_differs_from_the_reference(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pageant.kernels import launch

    right = launch.load

    def load_wrong(row: Any) -> Callable[..., None]:
        def run(call: Any) -> None:
            right(row)(call)
            if row.owner != "reference":
                call.out.mul_(1.02)

        return run

    monkeypatch.setattr(launch, "load", load_wrong)
    measurement = Measurement(tiny, Text(windows=WINDOWS, calibration=[]))
    row = measurement.row("fp8_e4m3", check=True)
    assert row.difference is not None
    assert row.difference > SAME
    assert [fault for fault in broken([row]) if "from the reference" in fault]


def test_squared_errors_are_relative_and_over_all_layers() -> None:
    exact, coarse = torch.full((1, 1, 16), 2.0), torch.full((1, 1, 16), 1.1)
    seen = [[(exact, exact), (coarse, exact)], [(coarse, exact)]]
    step = (1.125 - 1.1) ** 2
    k_error, v_error = squared_errors(seen, "fp8_e4m3", [Scales(), Scales()])
    assert k_error == pytest.approx(2 * step / (4 + 2 * 1.1**2), rel=1e-4)
    assert v_error == 0
    k_error, _ = squared_errors(seen, "fp8_e4m3", [Scales(k_scale=1.1), Scales(k_scale=1.1)])
    assert 0 < k_error < 1e-3


@pytest.mark.parametrize("name", list(FORMATS))
def test_smollm2_kernels_equal_the_reference_on_the_same_cache(
    smollm2: Measurement, name: str
) -> None:
    row = smollm2.row(name, check=True)
    assert row.difference is not None
    assert row.difference < SAME
    assert 1 < row.perplexity < 200


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))


def test_text_is_cut_into_windows_that_share_one_token() -> None:
    text = Text.of(Letters(), 10, 4, 5)
    assert [len(window) for window in text.windows] == [5, 5, 3]
    assert [window[-1] for window in text.windows[:2]] == [w[0] for w in text.windows[1:]]
    whole = [*text.windows[0], *text.windows[1][1:], *text.windows[2][1:]]
    assert [len(window) for window in text.calibration] == [4, 1]
    longer = Text.of(Letters(), 15, 15, 0)
    assert longer.windows == [whole + text.calibration[0] + text.calibration[1]]
    assert longer.calibration == []


def test_more_tokens_than_the_text_has() -> None:
    with pytest.raises(ArgumentError, match="tokens is 10000000; allowed: "):
        Text.of(Letters(), 10_000_000, 4, 0)


def row(format: str, **fields: Any) -> Row:
    errors = {"change_error": 0.1, "k_error": 0.1, "v_error": 0.1}
    plain = {"bytes_per_token": 1, "perplexity": 10.0, "change": 0.1}
    return Row(**{"format": format, **errors, **plain, **fields})


def test_bounds_that_hold_and_bounds_that_do_not() -> None:
    good = [row("fp32", change=0.0, difference=SAME), row("fp8_e4m3", change=BOUNDS["fp8_e4m3"])]
    good += [row("nvfp4", change=9.0), row("nvfp4_4over6", change=9.0, k_error=0.09, v_error=0.09)]
    assert broken(good) == []
    bad = [row("fp8_e4m3", change=1.51), row("int8", change=0.51), row("bf16", difference=0.06)]
    bad += [row("nvfp4"), row("nvfp4_4over6", k_error=0.09)]
    assert [fault.partition(":")[0] for fault in broken(bad)] == [
        "fp8_e4m3",
        "int8",
        "bf16",
        "nvfp4_4over6",
    ]
