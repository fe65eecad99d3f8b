"""Sampling: transformers' filters, a generator for each request, and what drafts leave alone."""

from collections import Counter

import numpy as np
import pytest
import torch

from pageant.engine.request import Sampling
from pageant.engine.sampler import Sampler, Turn, choose_tokens

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0]).log_softmax(dim=0)
PREFIX = np.array([3, 1])


def draws(sampling: Sampling, count: int) -> list[int]:
    sampler = Sampler(sampling, CPU)
    return [sampler.draw(LOGITS, torch.from_numpy(PREFIX)) for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature(temperature: float) -> None:
    count = 4000
    sampling = Sampling(temperature=temperature, seed=1)
    shares = torch.bincount(torch.tensor(draws(sampling, count)), minlength=4) / count
    torch.testing.assert_close(shares, (LOGITS / temperature).softmax(dim=0), atol=0.03, rtol=0)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    # Probabilities 0.03, 0.64, 0.24, 0.09.
    assert set(draws(Sampling(temperature=1, top_p=0.6, seed=2), 200)) == {1}
    assert set(draws(Sampling(temperature=1, top_p=0.7, seed=2), 200)) == {1, 2}


def test_seed_repeats_and_none_does_not() -> None:
    seeded = Sampling(temperature=2, seed=3)
    assert draws(seeded, 50) == draws(seeded, 50)
    assert draws(seeded, 50) != draws(Sampling(temperature=2, seed=4), 50)
    assert draws(Sampling(temperature=2), 50) != draws(Sampling(temperature=2), 50)


def test_rows_of_a_batch_do_not_disturb_each_other() -> None:
    sampling = Sampling(temperature=2, seed=5)
    mixed, alone = Sampler(sampling, CPU), draws(sampling, 20)
    others = Sampler(Sampling(temperature=1, seed=6), CPU)
    for expected in alone:
        turns = [Turn(sampler, PREFIX) for sampler in (None, mixed, others)]
        tokens = choose_tokens(torch.stack([LOGITS, LOGITS, LOGITS]), turns)
        assert tokens[:2] == [[1], [expected]]


@pytest.mark.parametrize(
    ("drafts", "tokens"),
    [
        ([], [1]),
        ([0], [1]),
        ([1], [1, 2]),
        ([1, 2], [1, 2, 0]),
        ([1, 1], [1, 2]),
        ([0, 2, 0], [1]),  # right again after a miss, but too late
        ([1, 2, 0], [1, 2, 0, 3]),
    ],
)
def test_greedy_takes_drafts_up_to_the_first_miss(drafts: list[int], tokens: list[int]) -> None:
    logits = torch.eye(4)[[1, 2, 0, 3]]
    turns = [Turn(None, PREFIX, drafts), Turn(None, PREFIX)]
    rows = torch.cat([logits[: 1 + len(drafts)], logits[3:]])
    assert choose_tokens(rows, turns) == [tokens, [3]]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.5, 0.8)])
def test_drafts_leave_the_target_distribution(temperature: float, top_p: float) -> None:
    """Chi-square over all runs of tokens that a step with two drafts can yield."""
    count, drafts = 6000, [1, 3]
    logits = torch.tensor(
        [[0.1, 0.9, -0.4, 0.3, 0.6], [0.5, -1.0, 0.2, 0.4, 0.0], [1.0, 0.0, 0.3, -0.2, 0.7]]
    )
    p = [_filtered((row / temperature).softmax(dim=0), top_p).tolist() for row in logits]
    expected = {(a,): p[0][a] for a in range(5) if a != 1}
    expected |= {(1, b): p[0][1] * p[1][b] for b in range(5) if b != 3}
    expected |= {(1, 3, c): p[0][1] * p[1][3] * p[2][c] for c in range(5)}
    assert sum(expected.values()) == pytest.approx(1)

    sampler = Sampler(Sampling(temperature=temperature, top_p=top_p, seed=11), CPU)
    turns = [Turn(sampler, PREFIX, drafts)] * count
    runs = Counter(map(tuple, choose_tokens(logits.repeat(count, 1), turns)))
    possible = {run: share for run, share in expected.items() if share > 0}
    assert set(runs) <= set(possible)
    chi_square = sum(
        (runs[run] - count * share) ** 2 / (count * share) for run, share in possible.items()
    )
    assert chi_square < 32.9  # 12 degrees of freedom or fewer: more in 1 of 1000 seeds


def _filtered(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens that hold top_p together, and nothing else."""
    ordered, places = probabilities.sort(descending=True)
    kept = (ordered.cumsum(dim=0) - ordered < top_p) * ordered
    return torch.zeros_like(kept).scatter(0, places, kept / kept.sum())


def test_a_seed_gives_the_same_tokens_with_drafts_of_any_number() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.7, seed=9)
    sampler, expected = Sampler(sampling, CPU), []
    for row in logits:
        expected += choose_tokens(row[None], [Turn(sampler, PREFIX)])[0]

    sampler, tokens, lengths = Sampler(sampling, CPU), [], set()
    while len(tokens) < len(logits):
        start = len(tokens)
        drafts = expected[start : start + start % 5]
        if start % 3 == 0 and drafts:
            drafts[-1] = (drafts[-1] + 1) % 6  # a wrong one
        drafts = drafts[: len(logits) - start - 1]
        rows = logits[start : start + len(drafts) + 1]
        (taken,) = choose_tokens(rows, [Turn(sampler, PREFIX, drafts)])
        lengths.add(len(taken))
        tokens += taken
    assert tokens == expected
    assert len(lengths) > 2


def test_logits_processors_see_the_tokens_before_each_place() -> None:
    seen: list[list[int]] = []

    def ban_what_came_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores.index_fill(1, ids[0, -1:], -torch.inf)

    sampler = Sampler(Sampling(temperature=1, seed=1), CPU)
    sampler._processors.append(ban_what_came_last)
    logits = torch.tensor([[0.0, 99.0, 0.0, 0.0]] * 3)
    logits[1, 2] = 50.0  # the second likeliest
    tokens = choose_tokens(logits[:1], [Turn(sampler, np.array([3, 0]))])
    assert tokens == [[1]]
    tokens = choose_tokens(logits[1:], [Turn(sampler, np.array([3, 0, 1]), drafts=[2])])
    assert tokens == [[2, 1]]
    assert seen == [[3, 0], [3, 0, 1], [3, 0, 1, 2]]
