"""Bounded channels between executors, and how a run of several threads ends when one of them fails.

Executors meet through channels only. Each executor is a thread, and each place where a thread may wait is a `Monitor`, which can be
*closed*: nobody waits on a closed monitor. That gives the whole of error handling:

- An error in any executor is *latched* in the run's `Failure`. The first one stays: it is the root error.
- Latching closes everything that was registered with the failure: all channels and the schedule. Threads that wait there, or come
  there later, get `ChannelClosed` and unwind.
- `run_executors` joins the threads and raises the root error, with the executor's name as a note. The `ChannelClosed` of the others only
  say that there was an error elsewhere, so they are not reported; anything else that goes wrong while stopping becomes a note.

Closing without an error is how a producer says that it is done: what is in the channel can still be taken, then iteration ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):  # noqa: N818  (a state that ends loops, like StopIteration)
    """The channel is closed; `__cause__` is the root error if one closed it."""


class Closable(Protocol):
    """What a `Failure` closes."""

    def close(self, error: BaseException | None = None) -> None:
        """Wakes all waiting threads; with an error, nothing works from now on."""
        ...


ClosableT = TypeVar("ClosableT", bound=Closable)


class Monitor:
    """A lock with a condition to wait for, which stops all waiting once it is closed.

    `with monitor:` takes the lock and works after a close too; `with monitor.when(predicate):` waits first and does not.

    Args:
        name: appears in error messages, with its kind: "channel 'prompts'".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._condition = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *exception: object) -> None:
        self._condition.release()

    @contextmanager
    def when(
        self,
        predicate: Callable[[], bool] = lambda: True,
        *,
        timeout_s: float | None = None,
        on_wait: Callable[[float], None] | None = None,
        survives_close: bool = False,
    ) -> Iterator[None]:
        """Waits for `predicate()`, runs the body under the lock, and wakes the others, whose predicates may hold now.

        Args:
            predicate: is evaluated under the lock, after each change.
            timeout_s: seconds to wait at most, None for no limit.
            on_wait: is told the seconds spent waiting (for the lock too), after the lock is released and also when an error is raised.
            survives_close: the body may still run after a close without error, if the predicate holds.

        Raises:
            ChannelClosed: the monitor is or gets closed.
            TimeoutError: the time is up.
        """
        waited_s = 0.0
        try:
            started_s = time.monotonic()
            with self._condition:
                try:
                    self._wait(predicate, timeout_s, survives_close)
                finally:
                    waited_s = time.monotonic() - started_s
                try:
                    yield
                finally:
                    self._condition.notify_all()
        finally:
            if on_wait is not None:
                on_wait(waited_s)

    def notify(self) -> None:
        """Makes waiting threads evaluate their predicates again."""
        with self._condition:
            self._condition.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Closes for good and wakes all. The first error stays; one that comes after a close without error still counts."""
        with self._condition:
            self._is_closed = True
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    @property
    def is_closed(self) -> bool:
        """Tells whether `close` was called."""
        return self._is_closed

    @property
    def error(self) -> BaseException | None:
        """Returns the error that it was closed with."""
        return self._error

    def _wait(self, predicate: Callable[[], bool], timeout_s: float | None, survives_close: bool) -> None:
        def is_over() -> bool:
            return self._is_closed or predicate()

        is_in_time = self._condition.wait_for(is_over, timeout_s)
        if self._error is not None:
            raise ChannelClosed(f"{self.name} was closed by {type(self._error).__name__}: {self._error}") from self._error
        if self._is_closed and not (survives_close and predicate()):
            raise ChannelClosed(f"{self.name} was closed; the other side is done")
        if not is_in_time:
            raise TimeoutError(f"waited {timeout_s} s for {self.name}; the executor at its other end is stuck or slower than this timeout")


class Channel(Generic[T]):
    """A bounded first-in-first-out queue between two or more threads that can be closed.

    Args:
        name: what travels in it, for messages and metrics.
        capacity: items it holds before `put` blocks.

    Raises:
        ValueError: capacity < 1.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity of channel '{name}' is {capacity}; it must hold at least 1 item")
        self.name = name
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._monitor = Monitor(f"channel '{name}'")

    def put(self, item: T, *, timeout_s: float | None = None, on_wait: Callable[[float], None] | None = None) -> None:
        """Appends an item, waiting for room.

        Args:
            item: what to hand over.
            timeout_s: seconds to wait at most, None for no limit.
            on_wait: is told the seconds waited.

        Raises:
            ChannelClosed: the channel is or gets closed.
            TimeoutError: no room in time; the item was not put.
        """
        with self._monitor.when(lambda: len(self._items) < self.capacity, timeout_s=timeout_s, on_wait=on_wait):
            self._items.append(item)

    def get(self, *, timeout_s: float | None = None, on_wait: Callable[[float], None] | None = None) -> T:
        """Takes the oldest item, waiting for one; arguments as for `put`.

        Raises:
            ChannelClosed: the channel was closed by an error, or closed and is empty.
            TimeoutError: no item in time.
        """
        with self._monitor.when(lambda: len(self._items) > 0, timeout_s=timeout_s, on_wait=on_wait, survives_close=True):
            return self._items.popleft()

    def drain(self) -> list[T]:
        """Takes all items that are there, oldest first, without waiting; none is an empty list.

        Raises:
            ChannelClosed: the channel was closed by an error, or closed and is empty.
        """

        def has_answer() -> bool:
            return len(self._items) > 0 or not self._monitor.is_closed

        with self._monitor.when(has_answer, survives_close=True):
            items = list(self._items)
            self._items.clear()
            return items

    def close(self, error: BaseException | None = None) -> None:
        """Refuses further items. Without an error the remaining ones can be taken; with one, every call raises `ChannelClosed` from it."""
        self._monitor.close(error)

    @property
    def is_closed(self) -> bool:
        """Tells whether `close` was called."""
        return self._monitor.is_closed

    def __len__(self) -> int:
        with self._monitor:
            return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Yields items until the channel is closed and empty; raises `ChannelClosed` if an error closed it."""
        return self.items()

    def items(self, on_wait: Callable[[float], None] | None = None) -> Iterator[T]:
        """Yields items like iteration does, and tells `on_wait` the seconds waited for each."""
        while True:
            try:
                item = self.get(on_wait=on_wait)
            except ChannelClosed:
                if self._monitor.error is not None:
                    raise
                return
            yield item


class Failure:
    """The first error of a run, and everything that must be closed when it comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._closables: list[Closable] = []

    @property
    def error(self) -> BaseException | None:
        """Returns the root error, or None as long as all is well."""
        return self._error

    def register(self, closable: ClosableT) -> ClosableT:
        """Adds a channel (or the schedule) to what an error closes, and returns it; closes it at once if the error is there already."""
        with self._lock:
            self._closables.append(closable)
            error = self._error
        if error is not None:
            closable.close(error)
        return closable

    def latch(self, error: BaseException) -> None:
        """Keeps the first error and closes everything; a later one, unless it is a mere `ChannelClosed`, becomes a note of the first."""
        while isinstance(error, ChannelClosed) and error.__cause__ is not None:
            error = error.__cause__
        with self._lock:
            root = self._error
            if root is None:
                self._error = error
            closables = list(self._closables)
        if root is None:
            for closable in closables:
                closable.close(error)
        elif error is not root and not isinstance(error, ChannelClosed):
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            root.add_note(f"later, while the run was stopping: {type(error).__name__}: {error}{notes}")


def run_executors(executors: Mapping[str, Callable[[], object]], failure: Failure, *, stop_timeout_s: float = 30.0) -> None:
    """Runs each executor in a thread of its own until all return, or until the first failure, which it raises.

    Args:
        executors: name → function that runs the executor to its end.
        failure: knows the channels that connect the executors. Anyone may latch an error in it (a watchdog, for instance), which
            ends the run.
        stop_timeout_s: seconds that the executors together get to stop after a failure; one that does not is named in a note of the error
            and left behind (threads are daemons).

    Raises:
        BaseException: the root error, whatever it is, with a note that names its executor. An interrupt (Ctrl-C) counts as one.
    """
    ended = failure.register(Channel[str]("ended executors", capacity=max(1, len(executors))))
    threads = [
        threading.Thread(target=_run_executor, args=(name, run, failure, ended), name=name, daemon=True) for name, run in executors.items()
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            _next_end(ended)
    except BaseException as error:  # noqa: BLE001  (an interrupt must close the channels too; the root error is raised below)
        failure.latch(error)
    stuck = _join([thread for thread in threads if thread.ident is not None], stop_timeout_s)
    root = failure.error
    if root is None:
        return
    if stuck:
        root.add_note(f"did not stop within {stop_timeout_s} s: {', '.join(stuck)}")
    raise root


def _next_end(ended: Channel[str]) -> str:
    """Waits in short naps: a signal that reached another thread is handled only once the main thread runs Python code again."""
    while True:
        with suppress(TimeoutError):
            return ended.get(timeout_s=0.5)


def _run_executor(name: str, run: Callable[[], object], failure: Failure, ended: Channel[str]) -> None:
    try:
        run()
    except BaseException as error:  # noqa: BLE001  (kept in the failure and raised by run_executors)
        if not isinstance(error, ChannelClosed) or error.__cause__ is None:
            error.add_note(f"raised in executor '{name}'")
        failure.latch(error)
    with suppress(ChannelClosed):  # closed by a failure: nobody waits for this any more
        ended.put(name)


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> list[str]:
    """Waits for the threads, `timeout_s` seconds in total, and returns the names of those that still run."""
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
