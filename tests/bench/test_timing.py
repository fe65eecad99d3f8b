"""Turns and medians, on a clock that only the calls move."""

from collections.abc import Callable

from pageant.bench.timing import Times, interleaved


def test_medians_of_turns_without_the_first_round() -> None:
    now, order = [0.0], []
    durations = {"a": iter([50.0, 1.0, 2.0, 9.0]), "b": iter([70.0, 4.0, 3.0, 5.0])}

    def call(name: str) -> None:
        order.append(name)
        now[0] += next(durations[name])

    def seconds(call: Callable[[], object]) -> float:
        before = now[0]
        call()
        return now[0] - before

    calls = {name: lambda name=name: call(name) for name in durations}
    times = interleaved(calls, 3, seconds)
    assert times == {"a": Times(2.0, 1.0, 4.0), "b": Times(4.0, 3.0, 1.0)}
    rounds = ["".join(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert len(rounds) == 4
    assert set(rounds) == {"ab", "ba"}


def test_nothing_to_time() -> None:
    assert interleaved({}, 3) == {}
