"""Sampling: transformers' filters, and a generator for each request."""

import pytest
import torch

from pageant.engine.request import Sampling
from pageant.engine.sampler import Sampler, choose_tokens

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0]).log_softmax(dim=0)


def draws(sampling: Sampling, count: int) -> list[int]:
    sampler = Sampler(sampling, CPU)
    return [sampler.draw(LOGITS) for _ in range(count)]


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
        tokens = choose_tokens(torch.stack([LOGITS, LOGITS, LOGITS]), [None, mixed, others])
        assert tokens[:2] == [1, expected]
