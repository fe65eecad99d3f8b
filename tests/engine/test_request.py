"""Requests: where they end, and the keys of their pages."""

import pytest

from pageant.engine.errors import EngineError
from pageant.engine.request import Request, Sampling


def request_of(prompt: list[int], max_new_tokens: int = 4, max_len: int = 100) -> Request:
    return Request.of(0, prompt, Sampling(max_new_tokens=max_new_tokens), 4, max_len)


@pytest.mark.parametrize(
    ("max_new_tokens", "max_len", "tokens", "reason"),
    [
        (4, 100, [5, 6, 9], "stop"),
        (4, 100, [5, 6, 7, 8], "length"),
        (4, 100, [5, 6, 7, 9], "stop"),
        (4, 5, [5, 6], "length"),
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
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}]
    + [{"top_p": top_p} for top_p in (0.0, 1.5)],
)
def test_wrong_sampling_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(EngineError, match=next(iter(setting))):
        Sampling(**setting)  # type: ignore[arg-type]
