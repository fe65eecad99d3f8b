"""Which requests of a batch decode and which prefill."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

IntArray = np.ndarray[Any, Any]


class Split(NamedTuple):
    """Sizes of the two regions of an ordered batch: decodes come first."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_start_loc: IntArray,
    num_tokens: int,
    max_query_len: int,
    threshold: int = 1,
    *,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    is_prefilling: IntArray | None = None,
) -> Split:
    """Cut the batch before the first request that is no decode, by vLLM's rule.

    A decode has at most `threshold` new tokens; with `require_uniform`, as many as the first
    request (or none). Requests after the cut are prefills whatever their length. Where everything
    decodes, padding tokens count as decode tokens.

    Args:
        query_start_loc: int [R + 1], first token of each request.
        num_tokens: tokens of the batch, padding included.
        max_query_len: bound on a request's new tokens.
        threshold: most new tokens of a decode.
        require_uniform: decodes must all have the same number of new tokens.
        treat_short_extends_as_decodes: count a short chunk of a prompt as a decode.
        is_prefilling: bool [R], needed where short chunks are told apart.

    >>> split_decodes_and_prefills(np.array([0, 1, 2, 9, 10]), num_tokens=10, max_query_len=7)
    Split(num_decodes=2, num_prefills=2, num_decode_tokens=2, num_prefill_tokens=8)
    """
    num_requests = len(query_start_loc) - 1
    all_decode = Split(num_requests, 0, num_tokens, 0)
    plain = not require_uniform or threshold <= 1
    if max_query_len <= threshold and plain and treat_short_extends_as_decodes:
        return all_decode
    lens = np.diff(query_start_loc)
    if num_requests == 0:
        return all_decode
    if lens[0] > threshold:
        return Split(0, num_requests, 0, num_tokens)
    if require_uniform:
        other = (lens != lens[0]) & (lens != 0)
        if treat_short_extends_as_decodes and not other.any():
            return all_decode
    else:
        other = lens > threshold
    if not treat_short_extends_as_decodes and is_prefilling is not None:
        other = other | is_prefilling
    if not other.any():
        return all_decode
    first = int(np.argmax(other))
    tokens = int(query_start_loc[first])
    return Split(first, num_requests - first, tokens, num_tokens - tokens)
