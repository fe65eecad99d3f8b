"""Drafts of a request's next tokens, looked up in its own tokens: no second model is needed.

Texts repeat themselves: names, quotations, code, a summary of what it summarises. Where the last
few tokens have stood before, what followed them then is a fair guess at what follows now.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST_MATCH = 3  # tokens


def look_up(tokens: npt.NDArray[np.int64], count: int) -> list[int]:
    """Up to `count` tokens that may follow `tokens`; none where nothing like their end came before.

    The longest end of up to LONGEST_MATCH tokens that also stands further ahead decides. Of several
    such places the last with `count` tokens after it is taken, else the first, which has the most.

    Args:
        tokens: int64 [N], a request's tokens so far.
        count: the most to propose, from 0 up.

    After 1 2 came 3 4 once, and 5 6 the last time; after 9 1 2 nothing is known:

    >>> look_up(np.array([1, 2, 3, 4, 1, 2, 5, 6, 9, 1, 2]), count=2)
    [5, 6]

    In a loop a later place has fewer tokens after it:

    >>> loop = np.array([7, 8, 7, 8, 7, 8, 7, 8])
    >>> look_up(loop, count=2), look_up(loop, count=5)
    ([7, 8], [7, 8, 7, 8])
    """
    if count < 1:
        return []
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        ends = _ends(tokens, length)
        if len(ends):
            full = ends[ends + count <= len(tokens)]
            end = full[-1] if len(full) else ends[0]
            proposed: list[int] = tokens[end : end + count].tolist()
            return proposed
    return []


def _ends(tokens: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
    """Where earlier copies of the last `length` tokens end, ascending.

    >>> _ends(np.array([5, 6, 5, 6, 5, 6]), 2).tolist()
    [2, 4]
    """
    starts = len(tokens) - length  # the last start is the end itself, no earlier copy
    found = np.ones(starts, np.bool_)
    for place in range(length):
        found &= tokens[place : place + starts] == tokens[starts + place]
    return np.flatnonzero(found) + length
