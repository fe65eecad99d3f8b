"""Which graph a batch takes, and that each is captured once."""

import pytest
import torch

import pageant
from pageant.graphs import buckets
from pageant.graphs.buckets import Buckets, default_sizes, smallest


def attention(max_requests=6, max_tokens=100, **options):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        limits=pageant.Limits(max_requests=max_requests, max_tokens=max_tokens, max_seq_len=64),
        options=pageant.Options(**options),
    )


def batch(count, lens=1):
    return pageant.Batch.from_lengths([lens] * count, [9] * count, [[0]] * count, 16)


@pytest.mark.parametrize(
    ("limits", "mixed", "sizes"),
    [
        ({}, False, [1, 2, 4, 6]),
        ({"speculative_tokens": 2}, False, [1, 2, 4, 8, 16, 18]),
        ({"max_tokens": 4}, False, [1, 2, 4]),
        ({"max_requests": 1}, False, [1]),
        ({}, True, [1, 2, 4, 8, 16, 32, 64, 100]),
    ],
)
def test_sizes_reach_what_the_limits_allow(limits, mixed, sizes):
    assert default_sizes(attention(**limits), mixed=mixed) == sizes


def test_the_smallest_with_room():
    sizes = [1, 2, 4, 6]
    assert [smallest(sizes, batch(count)) for count in range(7)] == [1, 1, 2, 4, 4, 6, 6]
    assert smallest(sizes, batch(3, lens=0)) == 4
    for lens, name in ((1, "num_tokens"), (0, "num_requests")):
        with pytest.raises(pageant.ArgumentError, match="at most 6") as caught:
            smallest(sizes, batch(7, lens))
        assert caught.value.argument == f"batch.{name}"


@pytest.fixture
def captured(monkeypatch):
    """Graphs that only note their size, in place of captured ones."""
    made = []

    def capture(_attn, _fn, *, tokens, **kind):
        made.append((tokens, *kind.values()))
        return tokens

    monkeypatch.setattr(buckets, "capture", capture)
    monkeypatch.setattr(buckets, "check_capturable", lambda _attn: None)
    return made


def test_each_is_captured_when_first_needed(captured):
    graphs = Buckets(attention(), print)
    assert graphs.sizes == [1, 2, 4, 6]
    assert not captured
    assert [graphs.graph_for(batch(count)) for count in (3, 4, 1, 3)] == [4, 4, 1, 4]
    assert captured == [(4, False, None, False), (1, False, None, False)]


def test_sizes_may_be_chosen(captured):
    graphs = Buckets(attention(), print, sizes=[64, 5, 64], mixed=True, shares=True)
    assert graphs.sizes == [5, 64]
    assert graphs.graph_for(batch(1, lens=7)) == 64
    assert captured == [(64, True, None, True)]


@pytest.mark.parametrize("sizes", [[], [0], [4, 101]])
def test_wrong_sizes_are_errors(captured, sizes):
    with pytest.raises(pageant.ArgumentError):
        Buckets(attention(), print, sizes=sizes)


def test_a_cpu_has_no_graphs():
    with pytest.raises(pageant.ArgumentError) as caught:
        Buckets(attention(), print)
    assert caught.value.argument == "attn.device"
