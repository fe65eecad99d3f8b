"""Which requests begin with the same pages, found in the page tables themselves.

Two requests share the keys of a page if their tables hold the same page id at the same place. Full
pages count, and only those that every row of a request sees whole, so what is shared needs no mask.
Requests of a group need not be neighbours, and groups nest: each level adds the keys its members
share beyond those of the level before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pageant.ranks import ALONE, ContextParallel
from pageant.types import bad

IntArray = np.ndarray[Any, Any]

LEVELS = 3  # of nested groups: a system prompt, a conversation, samples of its next turn


@dataclass(frozen=True, kw_only=True)
class Rule:
    """From how many common tokens on a group of at least so many members is worth sharing."""

    members: int
    tokens: int
    because: str


# A group is shared if any rule says so. How many times as fast as the plain path one call is was
# measured on two cores of an AMD EPYC for 32/8 heads of 128 in bfloat16, and 9/3 of 64 in float32.
# Of 32 members with 992 tokens: 1.7 and 2.1. Arithmetic stays; reading and widening keys is saved.
RULES: tuple[Rule, ...] = (
    Rule(members=2, tokens=2048, because="1.1 and 1.1 times as fast; 1024 tokens: 1.0 and 1.0"),
    Rule(members=4, tokens=1024, because="1.2 and 1.3 times as fast; 256 tokens: 1.1 and 0.9"),
    Rule(members=8, tokens=256, because="1.0 and 1.1 times as fast; 128 tokens: 1.0 and 1.0"),
)


@dataclass(frozen=True)
class SharedPrefix:
    """Keys that several requests have in common, and that are computed once for all their rows.

    Attributes:
        requests: the members, ascending.
        level: how many groups of larger membership hold the keys before these.
        first_key: where these keys begin; 0 for level 0.
        num_keys: how many they are: whole pages.
        pages: their page ids.
    """

    requests: tuple[int, ...]
    level: int
    first_key: int
    num_keys: int
    pages: tuple[int, ...]


def shared_prefixes(
    page_table: IntArray, visible: IntArray, page_size: int
) -> tuple[SharedPrefix, ...]:
    """The groups worth sharing, those of a lower level first.

    Args:
        page_table: int [R, W].
        visible: int64 [R], how many keys from the first on all rows of a request see; 0 for
            requests that cannot share.
        page_size: tokens a page.

    Three requests over pages of 1024 tokens, the first two of which share two:

    >>> table = np.array([[7, 8, 1], [7, 8, 2], [5, 3, 0]])
    >>> shared_prefixes(table, np.array([2100, 2300, 2000]), page_size=1024)
    (SharedPrefix(requests=(0, 1), level=0, first_key=0, num_keys=2048, pages=(7, 8)),)
    """
    pages = visible // page_size
    found = []
    # Requests that agree before `column`, the page at which their unshared keys begin, and a level.
    members = np.flatnonzero(pages > 0)
    waiting = [(members, 0, 0, 0)] if len(members) > 1 else []
    while waiting:
        members, column, begin, level = waiting.pop()
        for group in _same_page(page_table[members, column], members):
            end = _common_pages(page_table, pages, group, column)
            first, next_level = begin, level
            if is_worth(len(group), (end - begin) * page_size):
                found.append(
                    SharedPrefix(
                        requests=tuple(group.tolist()),
                        level=level,
                        first_key=begin * page_size,
                        num_keys=(end - begin) * page_size,
                        pages=tuple(page_table[group[0], begin:end].tolist()),
                    )
                )
                first, next_level = end, level + 1
            longer = group[pages[group] > end]
            if len(longer) > 1 and next_level < LEVELS:
                waiting.append((longer, end, first, next_level))
    return tuple(sorted(found, key=lambda prefix: (prefix.level, prefix.requests)))


def is_worth(members: int, tokens: int) -> bool:
    """Whether a rule says that computing so many common tokens once pays.

    >>> is_worth(2, 2047), is_worth(2, 2048), is_worth(32, 256)
    (False, True, True)
    """
    return any(members >= rule.members and tokens >= rule.tokens for rule in RULES)


def _same_page(ids: IntArray, members: IntArray) -> list[IntArray]:
    """Members with the same id, where those are several.

    >>> _same_page(np.array([4, 9, 4, 7]), np.array([0, 2, 3, 5]))
    [array([0, 3])]
    """
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1) != 0)
    ends = np.append(starts[1:], len(ids))
    several = ends - starts > 1
    pairs = zip(starts[several].tolist(), ends[several].tolist(), strict=True)
    return [members[order[a:b]] for a, b in pairs]


def _common_pages(page_table: IntArray, pages: IntArray, group: IntArray, column: int) -> int:
    """How many first pages all of a group have in common; they agree before `column`."""
    end = int(pages[group].min())
    part = page_table[group, column:end]
    differs = (part != part[0]).any(axis=0)
    return column + int(differs.argmax()) if differs.any() else end


def check_hint(
    hint: IntArray,
    page_table: IntArray,
    key_lens: IntArray,
    page_size: int,
    shard: ContextParallel = ALONE,
) -> None:
    """Raise if a request is said to share more full pages than its table shares with any other's.

    Args:
        hint: int [R], tokens.
        page_table: int [R, W].
        key_lens: int64 [R].
        page_size: tokens a page.
        shard: which keys the pages hold.
    """
    claimed = shard.count(np.maximum(hint, 0)) // page_size
    width = min(int(claimed.max(initial=0)), page_table.shape[1])
    shared = np.zeros_like(claimed)
    if width > 0:
        columns = np.arange(width)
        nobody = -(1 << 40) - np.arange(len(hint))[:, None]  # equals no other request's page
        full = columns < (shard.count(key_lens) // page_size)[:, None]
        table = np.where(full, page_table[:, :width].astype(np.int64), nobody)
        order = np.lexsort(table.T[::-1])  # a request's closest kin is its neighbour
        differs = table[order[1:]] != table[order[:-1]]
        same = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        shared[order[1:]] = same
        shared[order[:-1]] = np.maximum(shared[order[:-1]], same)
    wrong = (hint < 0) | (claimed > shared)
    if wrong.any():
        request = int(wrong.argmax())
        most = int(shared[request])
        top = shard.position(most * page_size + page_size - 1)
        allowed = f"0 to {top}, as page_table[{request}] begins with "
        allowed += f"{most} full pages of another request's"
        raise bad(f"batch.shared_prefix_lens[{request}]", int(hint[request]), allowed)
