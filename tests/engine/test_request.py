"""Requests: where they end, and the keys of their pages."""

import pytest

from pageant.engine.errors import EngineError
from pageant.engine.request import Request, Sampling


def request_of(prompt: list[int], max_new_tokens: int = 4, max_len: int = 100) -> Request:
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return Request.of(0, prompt, sampling, 4, max_len, "cache_full")


@pytest.mark.parametrize(
    ("max_new_tokens", "max_len", "tokens", "reason"),
    [
        (4, 100, [5, 6, 9], "stop"),
        (4, 100, [5, 6, 7, 8], "length"),
        (4, 100, [5, 6, 7, 9], "stop"),
        (4, 5, [5, 6], "cache_full"),
        (4, 7, [5, 6, 7, 8], "length"),
        (4, 6, [5, 6, 9], "stop"),
    ],
)
def test_end(max_new_tokens: int, max_len: int, tokens: list[int], reason: str) -> None:
    request = request_of([1, 2, 3], max_new_tokens, max_len)
    for token in tokens:
        assert request.finish_reason is None
        request.append(token, frozenset({9}))
    assert request.finish_reason == reason
    assert request.generated == tokens


def test_keys_depend_on_every_token_before() -> None:
    base = request_of(list(range(12))).keys_of(3, 4)
    other_start = request_of([99, *range(1, 12)]).keys_of(3, 4)
    other_end = request_of([*range(11), 99]).keys_of(3, 4)
    assert len(set(base)) == 3
    assert not set(base) & set(other_start)
    assert other_end[:2] == base[:2]
    assert other_end[2] != base[2]
    assert request_of([*range(12), 5]).keys_of(3, 4) == base


@pytest.mark.parametrize(
    "setting",
    [{"max_new_tokens": value} for value in (0, -1, 1.5, True, "8", None)]
    + [{"temperature": value} for value in (-1.0, float("nan"), float("inf"), None, "1", True)]
    + [{"top_p": value} for value in (0.0, 1.5, float("nan"), None, "1", True)]
    + [{"seed": value} for value in (2**64, -(2**63) - 1, 1.0, "1", True)],
)
def test_wrong_sampling_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(EngineError, match=next(iter(setting))):
        Sampling(**setting)  # type: ignore[arg-type]
