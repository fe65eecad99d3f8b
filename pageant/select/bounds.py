"""The largest numbers anyone may ask for: beyond every model and machine, but no further.

A slip such as 2**31 layers is then one clear error, and neither hours of allocation nor a number
that a type cannot hold. What lies within the bounds may still be too much for this machine's
memory; that is an error of its own.
"""

from __future__ import annotations

from pageant.types import bad

LARGEST_INT32 = 2**31 - 1  # the type of page ids, offsets and lengths

LARGEST: dict[str, int] = {
    # Shape: the head sizes have a list of their own.
    "num_q_heads": 2**14,
    "num_kv_heads": 2**14,
    # The cache.
    "page_size": 2**24,
    "num_layers": 2**14,
    "num_pages": LARGEST_INT32,
    "num_bytes": 2**62,
    # Limits.
    "max_requests": 2**20,
    "max_tokens": LARGEST_INT32,
    "max_seq_len": LARGEST_INT32,
    "max_cached_tokens": 2**20 * LARGEST_INT32,
    # Features and options.
    "windows": LARGEST_INT32,
    "speculative_tokens": 2**12,
    "plan_slots": 2**10,
    "debug_splits": 2**12,
    "world": 2**16,
    "interleave": LARGEST_INT32,
}


def is_whole(value: object, least: int, name: str | None = None) -> bool:
    """Whether a value is a whole number from `least` to the bound of that name, if it has one.

    >>> is_whole(2**14, 1, "num_layers"), is_whole(2**31, 1, "num_layers"), is_whole(True, 1)
    (True, False, False)
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= least and (name is None or value <= LARGEST[name])


def require_whole(name: str, value: object, least: int = 1) -> None:
    """Raise unless the value is a whole number from `least` to the bound of that name."""
    if not is_whole(value, least, name):
        raise bad(name, value, whole(least, name))


def whole(least: int, name: str) -> str:
    """What is_whole allows, in the words of errors.

    >>> whole(1, "plan_slots")
    'a whole number from 1 to 1024'
    """
    return f"a whole number from {least} to {LARGEST[name]}"
