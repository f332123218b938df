"""Channels and the end of a run: every wait ends, and the error that is raised is the first one."""

import signal
import threading

import pytest

from llamarl_jax.channels import Channel, ChannelClosed, Failure, Monitor, run_executors

LONG_S = 30.0  # never reached unless a test fails


class Waiter:
    """Calls a blocking function in a thread, and knows when it really waits (its predicate was evaluated under the lock)."""

    def __init__(self, monitor: Monitor, function):
        self.result, self.error = None, None
        is_waiting = threading.Event()
        condition_wait = monitor._condition.wait

        def wait(timeout=None):
            is_waiting.set()
            return condition_wait(timeout)

        monitor._condition.wait = wait  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self.thread.start()
        assert is_waiting.wait(LONG_S)
        with monitor:  # the lock is free only once the waiter has let go of it
            pass

    def _run(self, function):
        try:
            self.result = function()
        except Exception as error:  # noqa: BLE001
            self.error = error

    def join(self):
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        return self


def test_items_come_out_in_the_order_they_went_in():
    channel = Channel[int]("numbers", capacity=3)
    for item in (1, 2, 3):
        channel.put(item)
    assert len(channel) == 3
    channel.close()
    assert channel.is_closed
    assert list(channel) == [1, 2, 3]


def test_two_threads_hand_over_everything_through_one_place():
    channel = Channel[int]("numbers", capacity=1)

    def produce():
        for item in range(200):
            channel.put(item, timeout_s=LONG_S)
        channel.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    assert list(channel) == list(range(200))
    thread.join(LONG_S)


def test_put_blocks_until_there_is_room():
    channel = Channel[str]("words", capacity=1)
    channel.put("first")
    waits = []
    waiter = Waiter(channel._monitor, lambda: channel.put("second", on_wait=waits.append))
    assert len(channel) == 1
    assert not waits
    assert channel.get() == "first"
    waiter.join()
    assert channel.get() == "second"
    assert len(waits) == 1


def test_get_blocks_until_there_is_an_item():
    channel = Channel[str]("words", capacity=1)
    waits = []
    waiter = Waiter(channel._monitor, lambda: channel.get(on_wait=waits.append))
    channel.put("word")
    assert waiter.join().result == "word"
    assert len(waits) == 1


def test_iteration_reports_each_wait():
    channel = Channel[int]("numbers", capacity=2)
    channel.put(1)
    channel.put(2)
    channel.close()
    waits = []
    assert list(channel.items(on_wait=waits.append)) == [1, 2]
    assert len(waits) == 3  # the wait that ended with the close counts too


def test_drain_takes_what_is_there_without_waiting_and_makes_room():
    channel = Channel[int]("numbers", capacity=2)
    assert channel.drain() == []
    channel.put(1)
    channel.put(2)
    waiter = Waiter(channel._monitor, lambda: channel.put(3))
    assert channel.drain() == [1, 2]
    waiter.join()
    channel.close()
    assert channel.drain() == [3]
    with pytest.raises(ChannelClosed, match=r"channel 'numbers' was closed; the other side is done"):
        channel.drain()


def test_timeouts_name_the_channel():
    channel = Channel[int]("numbers", capacity=1)
    with pytest.raises(TimeoutError, match=r"waited 0\.0 s for channel 'numbers'; the executor at its other end is stuck or slower"):
        channel.get(timeout_s=0.0)
    channel.put(1)
    with pytest.raises(TimeoutError, match=r"waited 0\.0 s for channel 'numbers'"):
        channel.put(2, timeout_s=0.0)
    assert channel.drain() == [1]


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match=r"capacity of channel 'numbers' is 0; it must hold at least 1 item"):
        Channel("numbers", capacity=0)


@pytest.mark.parametrize("error", [None, KeyError("root")])
def test_closing_wakes_a_blocked_put_and_a_blocked_get(error):
    full, empty = Channel[int]("full", capacity=1), Channel[int]("empty", capacity=1)
    full.put(1)
    waits = []
    waiters = [
        Waiter(full._monitor, lambda: full.put(2, on_wait=waits.append)),
        Waiter(empty._monitor, lambda: empty.get(on_wait=waits.append)),
    ]
    for channel in (full, empty):
        channel.close(error)
    for waiter in waiters:
        caught = waiter.join().error
        assert isinstance(caught, ChannelClosed)
        assert caught.__cause__ is error
    assert len(waits) == 2


def test_all_blocked_threads_are_woken_not_only_one():
    channel = Channel[int]("numbers", capacity=1)
    waiters = [Waiter(channel._monitor, channel.get) for _ in range(3)]
    channel.close()
    assert all(isinstance(waiter.join().error, ChannelClosed) for waiter in waiters)


def test_a_close_with_an_error_discards_items_and_ends_iteration_with_it():
    channel = Channel[int]("numbers", capacity=2)
    channel.put(1)
    channel.close()
    root = KeyError("root")
    channel.close(root)
    channel.close(ValueError("later"))
    channel.close()
    for use in (channel.get, channel.drain, lambda: channel.put(2), lambda: list(channel)):
        with pytest.raises(ChannelClosed, match=r"channel 'numbers' was closed by KeyError: 'root'") as caught:
            use()
        assert caught.value.__cause__ is root


def test_an_error_in_a_predicate_or_body_leaves_the_monitor_usable():
    monitor, waits = Monitor("thing"), []

    def broken():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"), monitor.when(broken, on_wait=waits.append):
        pass
    with pytest.raises(KeyError, match="body"), monitor.when(on_wait=waits.append):
        raise KeyError("body")
    with monitor.when(on_wait=waits.append):
        pass
    assert len(waits) == 3


def test_failure_keeps_the_first_error_and_notes_the_later_ones():
    failure = Failure()
    channel = failure.register(Channel[int]("numbers", capacity=1))
    root, later = KeyError("root"), ValueError("later")
    later.add_note("raised in executor 'x'")
    failure.latch(root)
    failure.latch(root)
    failure.latch(later)
    failure.latch(ChannelClosed("numbers"))
    assert failure.error is root
    assert root.__notes__ == ["later, while the run was stopping: ValueError: later (raised in executor 'x')"]
    with pytest.raises(ChannelClosed, match="channel 'numbers' was closed by KeyError: 'root'"):
        channel.get()


def test_failure_takes_the_cause_of_a_closed_channel_as_root():
    failure, root = Failure(), KeyError("root")
    channel = Channel[int]("numbers", capacity=1)
    channel.close(root)
    with pytest.raises(ChannelClosed, match="channel 'numbers' was closed by KeyError: 'root'") as caught:
        channel.get()
    failure.latch(caught.value)
    assert failure.error is root


def test_a_channel_registered_after_the_failure_is_closed_at_once():
    failure = Failure()
    failure.latch(KeyError("root"))
    channel = failure.register(Channel[int]("numbers", capacity=1))
    with pytest.raises(ChannelClosed, match="root"):
        channel.put(1)


class Pipeline:
    """Three executors in a ring like those of a run; `faults` maps an executor's name to what it raises at its third item."""

    def __init__(self, faults=None):
        self.failure, self.faults, self.trained = Failure(), faults or {}, []
        self.completions = self.failure.register(Channel[int]("completions", capacity=1))
        self.trajectories = self.failure.register(Channel[int]("trajectories", capacity=1))
        self.weights = self.failure.register(Channel[int]("weights", capacity=1))
        self.executors = {"generator": self.generate, "reward": self.reward, "trainer": self.train}

    def _check(self, name, item):
        if item == 3 and name in self.faults:
            raise self.faults[name]

    def generate(self):
        for item in range(10):
            self._check("generator", item)
            self.completions.put(item)
            self.weights.get()
        self.completions.close()

    def reward(self):
        for item in self.completions:
            self._check("reward", item)
            self.trajectories.put(item)
        self.trajectories.close()

    def train(self):
        for item in self.trajectories:
            self._check("trainer", item)
            self.trained.append(item)
            self.weights.put(item)


def test_executors_run_to_their_end_in_named_threads():
    pipeline, names = Pipeline(), []
    pipeline.executors["observer"] = lambda: names.append(threading.current_thread().name)
    run_executors(pipeline.executors, pipeline.failure)
    assert pipeline.trained == list(range(10))
    assert names == ["observer"]
    assert pipeline.failure.error is None


def test_no_executors_is_an_empty_run():
    run_executors({}, Failure())


@pytest.mark.parametrize("name", ["generator", "reward", "trainer"])
@pytest.mark.parametrize("error", [ZeroDivisionError("the root"), SystemExit("the root")], ids=lambda error: type(error).__name__)
def test_an_error_in_any_executor_is_what_the_run_raises(name, error):
    fresh = type(error)("the root")
    pipeline = Pipeline({name: fresh})
    with pytest.raises(type(error), match="the root") as caught:
        run_executors(pipeline.executors, pipeline.failure)
    assert caught.value is fresh
    assert fresh.__notes__ == [f"raised in executor '{name}'"]
    assert "_check" in [entry.name for entry in caught.traceback]  # the traceback still leads to the place
    assert not {thread.name for thread in threading.enumerate()} & set(pipeline.executors)


def test_an_error_while_stopping_does_not_mask_the_root():
    failure = Failure()
    channel = failure.register(Channel[int]("numbers", capacity=1))

    def waits_and_breaks():
        try:
            channel.get()
        finally:
            raise ValueError("clean-up failed")

    def dies():
        raise ZeroDivisionError("root")

    with pytest.raises(ZeroDivisionError, match="root") as caught:
        run_executors({"waits": waits_and_breaks, "dies": dies}, failure)
    notes = "\n".join(caught.value.__notes__)
    assert "raised in executor 'dies'" in notes
    assert "later, while the run was stopping: ValueError: clean-up failed (raised in executor 'waits')" in notes


def test_an_executor_that_uses_a_channel_closed_without_error_is_itself_the_root():
    failure = Failure()
    channel = failure.register(Channel[int]("numbers", capacity=1))
    channel.close()
    with pytest.raises(ChannelClosed, match=r"channel 'numbers' was closed; the other side is done") as caught:
        run_executors({"late": lambda: channel.put(1)}, failure)
    assert caught.value.__notes__ == ["raised in executor 'late'"]


def test_an_executor_that_does_not_stop_is_named():
    gate = threading.Event()

    def dies():
        raise ZeroDivisionError("root")

    executors = {"deaf": lambda: gate.wait(LONG_S), "dies": dies}
    with pytest.raises(ZeroDivisionError, match="root") as caught:
        run_executors(executors, Failure(), stop_timeout_s=0.05)
    gate.set()
    assert caught.value.__notes__ == ["raised in executor 'dies'", "did not stop within 0.05 s: deaf"]


def test_an_error_latched_from_outside_ends_the_run():
    """As a stall watchdog does: no executor fails, but all of them wait."""
    pipeline = Pipeline()
    threading.Thread(target=lambda: pipeline.failure.latch(TimeoutError("stalled")), daemon=True).start()
    blocked = Channel[int]("never filled", capacity=1)
    pipeline.failure.register(blocked)
    with pytest.raises(TimeoutError, match="stalled"):
        run_executors({"blocked": blocked.get}, pipeline.failure)


@pytest.fixture
def python_handles_interrupts():
    """A process that a shell started in the background ignores SIGINT, and Python then installs no handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_interrupts")
def test_ctrl_c_closes_everything_and_is_raised_again():
    failure = Failure()
    channel = failure.register(Channel[int]("numbers", capacity=1))
    ended = threading.Event()

    def waits():
        signal.raise_signal(signal.SIGINT)  # reaches this thread, so that it does not interrupt the main thread's wait by itself
        try:
            channel.get()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_executors({"waits": waits}, failure)
    assert ended.is_set()
    assert isinstance(failure.error, KeyboardInterrupt)
