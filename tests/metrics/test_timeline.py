import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.metrics.timeline import Span, Timeline, read_spans


class Clock:
    """A clock that stands still until told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock=clock)


def test_work_waiting_and_the_rest(timeline, clock):
    with timeline.wait("trainer", "batch"):
        clock.now_s += 2
    clock.now_s += 0.5
    with timeline.span("trainer", "gradient"):
        clock.now_s += 3
    assert timeline.take_totals() == {
        "time/step_s": 5.5,
        "time/trainer_busy_s": 3.0,
        "time/trainer_wait_s": 2.0,
        "time/trainer_unaccounted_s": 0.5,
        "time/trainer_busy_s/gradient": 3.0,
        "time/trainer_wait_s/batch": 2.0,
    }


def test_an_inner_span_takes_its_seconds_from_the_outer_one(timeline, clock):
    with timeline.span("generator", "round"):
        clock.now_s += 1
        with timeline.wait("generator", "reward queue"):
            clock.now_s += 4
        clock.now_s += 2
    totals = timeline.take_totals()
    assert totals["time/generator_busy_s/round"] == 3
    assert totals["time/generator_wait_s/reward_queue"] == 4
    assert totals["time/generator_unaccounted_s"] == 0


def test_spans_of_two_executors_in_one_thread_are_both_counted(timeline, clock):
    with timeline.span("trainer", "publish"), timeline.span("weights", "export"):
        clock.now_s += 1
    totals = timeline.take_totals()
    assert totals["time/trainer_busy_s"] == totals["time/weights_busy_s"] == 1


def test_an_open_span_is_split_where_the_books_close(timeline, clock):
    with timeline.span("generator", "decode"):
        clock.now_s += 3
        first = timeline.take_totals()
        clock.now_s += 4
    second = timeline.take_totals()
    assert (first["time/generator_busy_s"], second["time/generator_busy_s"]) == (3, 4)
    assert first["time/generator_unaccounted_s"] == second["time/generator_unaccounted_s"] == 0
    assert timeline.spans() == [Span("generator", "decode", False, 0.0, 7.0)]


def test_an_idle_executor_stays_in_the_books(timeline, clock):
    with timeline.span("reward", "score"):
        clock.now_s += 1
    timeline.take_totals()
    clock.now_s += 2
    assert timeline.take_totals()["time/reward_unaccounted_s"] == 2


def test_an_exception_closes_the_span(timeline, clock):
    def fail():
        with timeline.span("trainer", "gradient"):
            clock.now_s += 1
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fail()
    clock.now_s += 1
    assert timeline.take_totals()["time/trainer_busy_s"] == 1


def test_overlapping_threads_of_one_executor_cover_their_seconds_once(timeline, clock):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with timeline.span("weights", "swap"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with timeline.span("weights", "export"):
        clock.now_s += 1
        thread.start()
        assert entered.wait(10)
        clock.now_s += 2
    clock.now_s += 4
    leave.set()
    thread.join()
    clock.now_s += 1
    totals = timeline.take_totals()
    assert totals["time/weights_busy_s"] == 3 + 6
    assert totals["time/weights_unaccounted_s"] == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["busy", "wait", "close", "take"]), st.integers(0, 5)), max_size=40))
def test_the_books_always_balance(events):
    clock = Clock()
    timeline = Timeline(clock=clock)
    open_spans, wall_s, accounted_s = [], 0.0, 0.0

    def take():
        totals = timeline.take_totals()
        parts = [totals.get(f"time/trainer_{part}_s", 0.0) for part in ("busy", "wait", "unaccounted")]
        assert min(parts) >= 0
        if "time/trainer_busy_s" in totals:
            assert sum(parts) == totals["time/step_s"]
        return totals["time/step_s"]

    for action, seconds in events:
        if action == "take":
            accounted_s += take()
        elif action == "close" and open_spans:
            open_spans.pop().__exit__(None, None, None)
        elif action in ("busy", "wait"):
            span = timeline.span("trainer", "a") if action == "busy" else timeline.wait("trainer", "b")
            span.__enter__()
            open_spans.append(span)
        clock.now_s += seconds
        wall_s += seconds
    assert accounted_s + take() == wall_s


def test_only_the_newest_spans_are_kept(clock):
    timeline = Timeline(clock=clock, max_spans=3)
    for i in range(5):
        with timeline.span("trainer", str(i)):
            clock.now_s += 1
    assert [span.kind for span in timeline.spans()] == ["2", "3", "4"]
    assert timeline.take_totals()["time/trainer_busy_s"] == 5


def test_spans_are_saved_and_read(timeline, clock, tmp_path):
    assert read_spans(tmp_path) == []
    with timeline.wait("trainer", "batch"):
        clock.now_s += 1
    timeline.save(tmp_path)
    assert read_spans(tmp_path) == timeline.spans()
