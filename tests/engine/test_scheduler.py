"""The scheduler, with a made-up model: invariants, order, budgets, preemption, prefixes, drafts."""

import itertools

import pytest
from hypothesis import event, given
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
        speculative_tokens: int = 0,
    ) -> None:
        self.page_size = page_size
        self.pool_tokens = num_pages * page_size
        self.limits = StepLimits(
            max_requests=max_requests,
            prefill_budget=12 if chunk_size else self.pool_tokens,
            chunk_size=chunk_size,
            speculative_tokens=speculative_tokens,
        )
        self.scheduler = Scheduler(
            PagePool(num_pages), page_size, self.limits, prefix_cache=prefix_cache
        )
        self.slots: list[tuple[int, ...] | None] = [None] * self.pool_tokens
        self.ids = itertools.count()
        self.finished: list[Request] = []
        self.num_drafted = self.num_accepted = 0

    def add(self, prompt: list[int], max_new_tokens: int) -> Request:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        request = Request.of(next(self.ids), prompt, sampling, self.page_size, self.pool_tokens)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Work]:
        works = self.scheduler.schedule()
        self.check_step(works)
        for work in works:  # all writes of a step come before its reads
            for position in range(work.start, work.start + len(work.token_ids)):
                self.slots[self.slot(work.request, position)] = self.prefix(work, position)
        for work in works:
            for position in range(work.start + len(work.token_ids)):
                stored = self.slots[self.slot(work.request, position)]
                assert stored == self.prefix(work, position)
        for work in works:
            if work.samples:
                self.take(work)
        self.check_pages()
        return works

    def take(self, work: Work) -> None:
        """Give a request its next token, after those drafts that are right."""
        request, num_accepted = work.request, 0
        for draft in [*work.drafts, None]:
            token = self.next_token(request.num_tokens)
            request.append(token, STOP)
            if token != draft:
                break
            num_accepted += 1
        if work.drafts:
            self.scheduler.accept(request, num_accepted)
            self.num_drafted += len(work.drafts)
            self.num_accepted += num_accepted
        if request.finish_reason:
            self.scheduler.finish(request)
            self.finished.append(request)

    def next_token(self, position: int) -> int:
        """A loop with a slip now and then, so that drafts are right and wrong."""
        return 99 if position % 7 == 6 else 100 + position % 3

    def slot(self, request: Request, position: int) -> int:
        page = int(request.pages[position // self.page_size])
        return page * self.page_size + position % self.page_size

    def prefix(self, work: Work, position: int) -> tuple[int, ...]:
        """What a key depends on: its token and all before."""
        tokens = [*work.request.tokens[: work.start].tolist(), *work.token_ids.tolist()]
        return tuple(tokens[: position + 1])

    def check_step(self, works: list[Work]) -> None:
        assert works, "a step without work would never end"
        assert len({work.request.id for work in works}) == len(works) <= self.limits.max_requests
        prefill = sum(work.num_tokens for work in works if work.num_tokens > 1)
        assert prefill <= self.limits.prefill_budget
        if self.limits.chunk_size:
            assert max(work.num_tokens for work in works) <= self.limits.chunk_size
        ranks = [work.rank for work in works]
        assert ranks == sorted(ranks)
        assert sum(len(work.token_ids) for work in works) <= self.limits.max_tokens
        for work in works:
            room = work.request.num_missing - 1 if work.samples and work.num_tokens == 1 else 0
            assert len(work.drafts) <= min(self.limits.speculative_tokens, room)

    def check_pages(self) -> None:
        pool = self.scheduler.pool
        owned = [
            page
            for request in self.scheduler.running
            for page in request.pages[: request.num_pages].tolist()
        ]
        for request in self.scheduler.running:  # rejected drafts leave no page behind
            assert request.num_pages == -(-request.num_computed // self.page_size)
        assert all(request.num_pages == 0 for request in self.scheduler.waiting)
        assert all(request.num_pages == 0 for request in self.finished)
        assert sorted([*pool._free, *pool._idle, *set(owned)]) == list(range(pool.num_pages))
        assert pool._references == [owned.count(page) for page in range(pool.num_pages)]
        for page, key in pool._key_of.items():
            tokens = self.slots[(page + 1) * self.page_size - 1]
            assert tokens is not None
            assert (
                Request.of(0, list(tokens), Sampling(), self.page_size, len(tokens) + 1).keys_of(
                    len(tokens) // self.page_size, self.page_size
                )[-1]
                == key
            )

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
        speculative_tokens=data.draw(st.integers(0, 5)),
    )
    longest = simulation.pool_tokens - 1
    num_requests = data.draw(st.integers(1, 8))
    for _ in range(num_requests):
        length = data.draw(st.integers(1, longest))
        first = data.draw(st.integers(0, 1))  # few different prompts, so that prefixes meet
        simulation.add([first] * length, data.draw(st.integers(1, 24)))
        if data.draw(st.booleans()):
            simulation.step()
    simulation.run()
    assert len(simulation.finished) == num_requests
    assert simulation.scheduler.pool.num_owned == 0
    for request in simulation.finished:
        places = range(request.num_prompt_tokens, request.num_tokens)
        assert request.generated == [simulation.next_token(place) for place in places]
    event(f"drafts accepted: {simulation.num_accepted > 0}")
    event(f"drafts rejected: {simulation.num_accepted < simulation.num_drafted}")
    event(f"preemptions: {simulation.scheduler.num_preemptions > 0}")


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


def test_a_request_brings_drafts_once_its_last_token_is_all_it_computes() -> None:
    simulation = Simulation(num_pages=20, chunk_size=5, speculative_tokens=4)
    request = simulation.add([1, 2, 1, 2, 1, 2, 1], 12)  # the model goes on 101, 102, 100, ...
    drafts = []
    while not request.finish_reason:
        (work,) = simulation.step()
        drafts.append((work.start, work.num_tokens, work.drafts))
    assert request.generated == [101, 102, 100, 101, 102, 100, 99, 102, 100, 101, 102, 100]
    assert drafts == [
        (0, 5, ()),
        (5, 2, ()),
        (7, 1, ()),  # 101 is new
        (8, 1, ()),
        (9, 1, ()),
        (10, 1, (102, 100, 101)),  # 101 again, and what followed it; the third is wrong
        (13, 1, ()),  # 99 is new
        (14, 1, (100, 99, 102)),  # as many as leave room for one more; the second is wrong
        (16, 1, (102,)),
    ]


def test_drafts_end_with_the_request() -> None:
    simulation = Simulation(num_pages=20, chunk_size=None, speculative_tokens=4)
    request = simulation.add([100, 101, 102] * 3, 4)
    steps = [simulation.step()[0] for _ in range(2)]
    assert [len(work.drafts) for work in steps] == [0, 2]  # of three tokens the last is no draft
    assert (request.num_tokens, request.finish_reason) == (13, "length")


def test_drafts_take_spare_pages_only_and_give_them_back() -> None:
    limits = StepLimits(max_requests=2, prefill_budget=12, chunk_size=None, speculative_tokens=4)
    assert limits.max_tokens == 12 + 2 * 5
    scheduler = Scheduler(PagePool(11), 1, limits, prefix_cache=False)
    first = Request.of(0, [1, 2, 1, 2, 1], Sampling(), 1, 11)
    second = Request.of(1, [3], Sampling(), 1, 11)
    for request in (first, second):
        scheduler.add(request)
    scheduler.schedule()
    first.append(2, STOP)
    second.append(3, STOP)
    works = scheduler.schedule()  # 1 2 1 2 1 2 and 3 3: three of eleven pages are left
    assert [work.drafts for work in works] == [(1, 2), (3,)]
    assert (scheduler.pool.num_owned, scheduler.num_preemptions) == (11, 0)

    for token in (1, 1):  # the first draft, and what came in place of the second
        first.append(token, STOP)
    scheduler.accept(first, 1)
    second.append(5, STOP)
    scheduler.accept(second, 0)
    assert (first.num_pages, second.num_pages, scheduler.pool.num_owned) == (7, 2, 9)
    assert (first.num_pending, second.num_pending) == (1, 1)

    works = scheduler.schedule()  # the next tokens take the last two pages; 1 would have drafts
    assert [work.drafts for work in works] == [(), ()]
    assert (scheduler.pool.num_owned, scheduler.num_preemptions) == (11, 0)
