"""The page pool: every page is free, idle or owned, and a known prefix is found again."""

from hypothesis import given
from hypothesis import strategies as st

from pageant.engine.pages import PagePool

NUM_PAGES = 6


def check_states(pool: PagePool, owners: list[list[int]]) -> None:
    """Each page is in one state, and its references are the requests that hold it."""
    held = [page for pages in owners for page in pages]
    free, idle = list(pool._free), list(pool._idle)
    assert sorted(free + idle + list(set(held))) == list(range(pool.num_pages))
    assert pool._references == [held.count(page) for page in range(pool.num_pages)]
    assert {key: page for page, key in pool._key_of.items()} == pool._page_of
    assert set(idle) <= set(pool._key_of)
    assert not set(free) & set(pool._key_of)
    assert (pool.num_free, pool.num_idle, pool.num_owned) == (len(free), len(idle), len(set(held)))


@given(st.data())
def test_pages_have_one_state(data: st.DataObject) -> None:
    pool = PagePool(NUM_PAGES)
    owners: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["allocate", "release", "publish", "reuse"]))
        if action == "allocate":
            count = data.draw(st.integers(0, NUM_PAGES))
            available = pool.num_available
            pages = pool.allocate(count)
            assert (pages is None) == (count > available)
            owners += [pages] if pages else []
        elif action == "reuse":
            keys = data.draw(st.lists(st.binary(min_size=1, max_size=1), max_size=3))
            known = dict(pool._page_of)
            pages = pool.reuse(keys)
            assert pages == [known[key] for key in keys[: len(pages)]]
            assert len(pages) == len(keys) or keys[len(pages)] not in known
            owners += [pages] if pages else []
        elif owners:
            index = data.draw(st.integers(0, len(owners) - 1))
            if action == "release":
                pool.release(owners.pop(index))
            else:
                page = data.draw(st.sampled_from(owners[index]))
                if page not in pool._key_of:
                    pool.publish(page, data.draw(st.binary(min_size=1, max_size=1)))
        check_states(pool, owners)


def test_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pool = PagePool(4)
    older, newer = pool.allocate(2), pool.allocate(2)
    assert older is not None
    assert newer is not None
    for name, pages in (("older", older), ("newer", newer)):
        for index, page in enumerate(pages):
            pool.publish(page, f"{name} {index}".encode())
        pool.release(pages)

    assert pool.allocate(1) == [older[1]]
    assert pool.reuse([b"older 0", b"older 1"]) == [older[0]]  # now owned, so not to be evicted
    assert pool.allocate(2) == [newer[1], newer[0]]
    assert pool.allocate(1) is None


def test_first_page_of_a_key_stays() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.publish(first[0], b"key")
    pool.publish(second[0], b"key")
    pool.release(second)
    assert (pool.num_free, pool.num_idle) == (1, 0)
    assert pool.reuse([b"key"]) == first
