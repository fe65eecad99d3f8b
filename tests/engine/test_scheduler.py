"""The scheduler, with a made-up model: invariants, order, budgets, preemption, prefix reuse."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageant.engine.pages import PagePool
from pageant.engine.request import Request, Sampling
from pageant.engine.scheduler import Scheduler, StepLimits, Work

STOP: frozenset[int] = frozenset()


class Simulation:
    """Runs a scheduler; the cache is a list that notes which token each slot holds."""

    def __init__(
        self,
        num_pages: int,
        page_size: int = 4,
        chunk_size: int | None = 8,
        max_requests: int = 4,
        prefix_cache: bool = True,
    ) -> None:
        self.page_size = page_size
        self.pool_tokens = num_pages * page_size
        self.limits = StepLimits(
            max_requests=max_requests,
            prefill_budget=12 if chunk_size else self.pool_tokens,
            chunk_size=chunk_size,
        )
        self.scheduler = Scheduler(
            PagePool(num_pages), page_size, self.limits, prefix_cache=prefix_cache
        )
        self.slots: list[tuple[int, ...] | None] = [None] * self.pool_tokens
        self.ids = itertools.count()
        self.finished: list[Request] = []

    def add(self, prompt: list[int], max_new_tokens: int) -> Request:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        request = Request.of(next(self.ids), prompt, sampling, self.page_size, self.pool_tokens)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Work]:
        works = self.scheduler.schedule()
        self.check_step(works)
        for work in works:  # all writes of a step come before its reads
            for position in range(work.start, work.start + work.num_tokens):
                self.slots[self.slot(work.request, position)] = self.prefix(work.request, position)
        for work in works:
            for position in range(work.start + work.num_tokens):
                stored = self.slots[self.slot(work.request, position)]
                assert stored == self.prefix(work.request, position)
            if work.samples:
                work.request.append(100 + work.request.num_tokens, STOP)
                if work.request.finish_reason:
                    self.scheduler.finish(work.request)
                    self.finished.append(work.request)
        self.check_pages()
        return works

    def slot(self, request: Request, position: int) -> int:
        page = int(request.pages[position // self.page_size])
        return page * self.page_size + position % self.page_size

    def prefix(self, request: Request, position: int) -> tuple[int, ...]:
        """What a key depends on: its token and all before."""
        return tuple(request.tokens[: position + 1].tolist())

    def check_step(self, works: list[Work]) -> None:
        assert works, "a step without work would never end"
        assert len({work.request.id for work in works}) == len(works) <= self.limits.max_requests
        prefill = sum(work.num_tokens for work in works if work.num_tokens > 1)
        assert prefill <= self.limits.prefill_budget
        if self.limits.chunk_size:
            assert max(work.num_tokens for work in works) <= self.limits.chunk_size
        ranks = [work.rank for work in works]
        assert ranks == sorted(ranks)

    def check_pages(self) -> None:
        pool = self.scheduler.pool
        owned = [
            page
            for request in self.scheduler.running
            for page in request.pages[: request.num_pages].tolist()
        ]
        assert all(request.num_pages == 0 for request in self.scheduler.waiting)
        assert all(request.num_pages == 0 for request in self.finished)
        assert sorted([*pool._free, *pool._idle, *set(owned)]) == list(range(pool.num_pages))
        assert pool._references == [owned.count(page) for page in range(pool.num_pages)]

    def run(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


@given(st.data())
def test_every_request_ends_with_its_pages_right(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 4]))
    num_pages = data.draw(st.integers(3, 12))
    simulation = Simulation(
        num_pages,
        page_size,
        chunk_size=data.draw(st.sampled_from([None, 1, 5, 8])),
        max_requests=data.draw(st.integers(1, 4)),
        prefix_cache=data.draw(st.booleans()),
    )
    longest = simulation.pool_tokens - 1
    num_requests = data.draw(st.integers(1, 8))
    for _ in range(num_requests):
        length = data.draw(st.integers(1, longest))
        first = data.draw(st.integers(0, 1))  # few different prompts, so that prefixes meet
        simulation.add([first] * length, data.draw(st.integers(1, 10)))
        if data.draw(st.booleans()):
            simulation.step()
    simulation.run()
    assert len(simulation.finished) == num_requests
    assert simulation.scheduler.pool.num_owned == 0


def test_long_prompts_go_in_chunks_within_the_budget() -> None:
    simulation = Simulation(num_pages=20)
    first, second = simulation.add([1] * 20, 3), simulation.add([2] * 20, 3)
    steps = [[(w.request, w.start, w.num_tokens) for w in simulation.step()] for _ in range(3)]
    assert steps[0] == [(first, 0, 8), (second, 0, 4)]
    assert steps[1] == [(first, 8, 8), (second, 4, 4)]
    assert steps[2] == [(first, 16, 4), (second, 8, 8)]


def test_decodes_go_on_beside_a_long_prompt_and_come_first() -> None:
    simulation = Simulation(num_pages=20)
    short = simulation.add([1, 2], 10)
    simulation.step()
    simulation.add([3] * 30, 2)
    for _ in range(4):
        works = simulation.step()
        assert (works[0].request, works[0].num_tokens) == (short, 1)
        assert len(works) == 2


def test_latest_request_is_preempted_and_goes_to_the_front() -> None:
    simulation = Simulation(num_pages=4, prefix_cache=False)
    first, second = simulation.add([1] * 7, 8), simulation.add([2] * 7, 8)
    third = simulation.add([3] * 3, 8)
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    assert simulation.scheduler.running == [first]
    assert list(simulation.scheduler.waiting) == [second, third]
    assert second.num_preemptions == 1
    assert second.num_tokens > 7  # its tokens are kept
    assert (second.num_computed, second.num_pages) == (0, 0)
    simulation.run()
    assert simulation.finished == [first, second, third]


def test_a_request_as_long_as_the_pool_ends() -> None:
    simulation = Simulation(num_pages=3, chunk_size=None)
    request = simulation.add([1] * 11, 50)
    simulation.run()
    assert (request.num_tokens, request.finish_reason) == (12, "length")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_known_prefix_is_not_computed_again(prefix_cache: bool) -> None:
    simulation = Simulation(num_pages=20, prefix_cache=prefix_cache)
    simulation.add([1] * 9, 1)
    simulation.run()
    simulation.add([1] * 8 + [2], 1)
    simulation.add([1] * 8, 1)  # its last token must be computed for its logits
    works = simulation.step()
    assert [work.start for work in works] == ([8, 4] if prefix_cache else [0, 0])
    assert simulation.scheduler.num_reused_tokens == (12 if prefix_cache else 0)


def test_a_prefix_is_shared_within_one_step() -> None:
    simulation = Simulation(num_pages=20)
    simulation.add([1] * 8 + [2], 1)
    simulation.add([1] * 8 + [3], 1)
    assert sorted(work.start for work in simulation.step()) == [0, 8]


@pytest.mark.parametrize(
    ("start", "num_tokens", "rank"), [(6, 1, 0), (4, 1, 1), (2, 3, 2), (0, 5, 3), (0, 1, 3)]
)
def test_rank(start: int, num_tokens: int, rank: int) -> None:
    request = Request.of(0, [1] * 6, Sampling(), 4, 100)
    assert Work(request, start, num_tokens).rank == rank
