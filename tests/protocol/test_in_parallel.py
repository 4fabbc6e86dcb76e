"""`clock.in_parallel`: calls that run at the same time, in threads, without threads and on virtual time."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
from virtual_time import Killed, VirtualBackground, VirtualClock, VirtualTime

from diloco_orchestrator.clock import Background, NoBackground, ThreadBackground, in_parallel


def fails(name: str) -> None:
    raise LookupError(name)


@pytest.mark.parametrize("background", [ThreadBackground(), NoBackground()])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_have_the_order_of_the_calls(background: Background, count: int):
    assert in_parallel(background, [partial(int, index) for index in range(count)]) == list(range(count))


def test_calls_wait_for_each_other_and_not_for_more_than_are_allowed_at_once():
    both_run = threading.Barrier(2)  # a third call at the same time would break it
    in_parallel(ThreadBackground(), [lambda: both_run.wait()] * 6, most=2)
    seen: set[int] = set()
    in_parallel(ThreadBackground(), [lambda: seen.add(threading.get_ident())] * 6, most=1)
    assert seen == {threading.get_ident()}


def test_an_index_error_of_a_call_is_an_error_like_others():
    with pytest.raises(IndexError):
        in_parallel(NoBackground(), [partial([].pop, 0), partial(int, 1)])  # type: ignore[list-item]


# -- on virtual time --------------------------------------------------------------------------------------------------


def on_virtual_time(play: Callable[[VirtualClock, VirtualBackground], None]) -> VirtualTime:
    time = VirtualTime()
    time.spawn("process", lambda clock: play(clock, VirtualBackground(clock)))
    time.run()
    return time


def test_parallel_calls_take_the_time_of_the_longest():
    def play(clock: VirtualClock, background: VirtualBackground) -> None:
        in_parallel(background, [partial(clock.sleep, seconds) for seconds in (3.0, 1.0, 2.0)])
        assert clock.now() == 3.0
        in_parallel(background, [partial(clock.sleep, seconds) for seconds in (3.0, 1.0, 2.0)], most=2)
        assert clock.now() == 6.0  # the third call begins when the second has ended

    on_virtual_time(play)


def test_the_first_error_in_order_is_raised_when_all_calls_that_began_have_ended():
    ended: list[int] = []

    def call(clock: VirtualClock, index: int, seconds: float, error: str = "") -> None:
        clock.sleep(seconds)
        ended.append(index)
        if error:
            fails(error)

    def play(clock: VirtualClock, background: VirtualBackground) -> None:
        times = [(3.0, "first"), (1.0, "second"), (4.0, ""), (1.0, "never begins")]
        calls = [partial(call, clock, index, seconds, error) for index, (seconds, error) in enumerate(times)]
        with pytest.raises(LookupError, match="first"):
            in_parallel(background, calls, most=3)
        assert ended == [1, 0, 2]

    on_virtual_time(play)


def test_a_process_that_is_killed_leaves_some_of_its_parallel_calls_undone():
    done: list[float] = []

    def play(clock: VirtualClock) -> None:
        def call(seconds: float) -> None:
            clock.sleep(seconds)
            done.append(seconds)

        in_parallel(VirtualBackground(clock), [partial(call, seconds) for seconds in (3.0, 1.0, 2.0)])
        done.append(-1.0)

    time = VirtualTime()
    process = time.spawn("process", play)
    time.at(1.5, lambda: time.kill(process))
    time.run()
    assert done == [1.0] and process.ended


def test_a_process_that_ends_takes_its_threads_with_it():
    done: list[str] = []

    def play(clock: VirtualClock) -> None:
        def later() -> None:
            try:
                clock.sleep(5.0)
            except Killed:
                done.append("killed")
                raise

        VirtualBackground(clock).start(later)
        clock.sleep(1.0)

    time = VirtualTime()
    time.spawn("process", play)
    time.run()
    assert done == ["killed"]
