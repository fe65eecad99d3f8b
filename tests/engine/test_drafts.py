"""Prompt lookup: which tokens it proposes."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pageant.engine.drafts import LONGEST_MATCH, look_up


@pytest.mark.parametrize(
    ("tokens", "count", "drafts"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([5, 6], 3, []),
        ([5, 5], 3, [5]),
        ([1, 2, 3, 1], 0, []),
        ([1, 2, 3, 1], 1, [2]),
        ([1, 2, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 1], 9, [2, 3, 1]),
        ([1, 5, 1, 6, 1], 1, [6]),  # the last place
        ([1, 5, 1, 6, 1], 2, [6, 1]),
        ([1, 5, 1, 6, 1], 3, [5, 1, 6]),  # the last place with three tokens after it
        ([3, 2, 5, 7, 2, 6, 3, 2], 1, [5]),  # a longer match before a later one
        ([4, 3, 2, 5, 9, 3, 2, 6, 4, 3, 2], 1, [5]),
        ([8, 4, 3, 2, 5, 1, 4, 3, 2, 6, 8, 4, 3, 2], 1, [6]),  # no more than three tokens count
        ([9, 2, 5, 3, 2], 2, [5, 3]),  # one token is match enough
        ([7, 7, 7, 7, 7], 1, [7]),
        ([7, 7, 7, 7, 7], 2, [7, 7]),
        ([7, 7, 7, 7, 7], 3, [7, 7]),
    ],
)
def test_worked_examples(tokens: list[int], count: int, drafts: list[int]) -> None:
    assert look_up(np.array(tokens, np.int64), count) == drafts


@given(st.lists(st.integers(0, 3), max_size=24), st.integers(0, 6))
def test_drafts_are_what_followed_the_longest_match(tokens: list[int], count: int) -> None:
    drafts = look_up(np.array(tokens, np.int64), count)
    places: dict[int, list[int]] = {}
    for length in range(1, min(LONGEST_MATCH, len(tokens)) + 1):
        pairs = [(end, tokens[end - length : end]) for end in range(length, len(tokens))]
        places[length] = [end for end, copy in pairs if copy == tokens[len(tokens) - length :]]
    longest = max((length for length, ends in places.items() if ends), default=0)
    event(f"longest match {longest}")
    if not longest or not count:
        assert drafts == []
        return
    followed = [tokens[end : end + count] for end in places[longest]]
    most = max(map(len, followed))
    assert drafts == [run for run in followed if len(run) == most][-1]
