"""Ends a run that no longer moves, and leaves behind where every thread stood.

Each executor calls `beat` whenever it has made progress. When nobody has for `timeout_s`, something waits for something that will never
come. The watchdog then writes the stack of every Python thread to the run folder and to stderr and hands a `StallError` to `on_stall`,
which closes the channels so that the error surfaces as the root error of the run.

One executor may be idle for long (the generator while the trainer compiles), hence the rule: *no* executor beats, not *some*. A long
compilation is one long silence, so the time-out must exceed the longest one. A thread that holds the interpreter's lock stops the watchdog
too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "stall_stacks.txt"


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """When a silent run counts as stalled."""

    timeout_s: float = 600.0
    """Seconds without progress of any executor after which the run ends with the stacks of all threads; above the longest compilation."""


class StallError(RuntimeError):
    """No executor made progress for too long."""


class Watchdog:
    """Calls `on_stall` once when no executor beats for `timeout_s`; a context manager that starts and stops its thread."""

    def __init__(
        self,
        timeout_s: float,
        on_stall: Callable[[StallError], None],
        *,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the watchdog; `__enter__` starts it.

        Args:
            timeout_s: seconds without a beat that count as a stall.
            on_stall: receives the error on the watchdog's thread.
            run_dir: folder that gets `stall_stacks.txt`.
            clock: seconds from any origin, never decreasing.

        Raises:
            ValueError: the time-out is not positive.
        """
        if not timeout_s > 0:
            raise ValueError(f"the stall time-out is {timeout_s} s; choose a positive number for watchdog.timeout_s")
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._run_dir = run_dir
        self._clock = clock
        self._last_s = clock()
        self._beats_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)

    def beat(self, name: str) -> None:
        """Notes that the named executor has made progress."""
        self._last_s = self._beats_s[name] = self._clock()

    def check(self) -> StallError | None:
        """Returns the error, with the stacks already dumped, if the run has stalled; the watchdog's thread calls this."""
        now_s = self._clock()
        if now_s - self._last_s <= self._timeout_s:
            return None
        path = dump_stacks(self._run_dir)
        beats = ", ".join(f"{name} {now_s - beat_s:.0f} s ago" for name, beat_s in sorted(self._beats_s.items()))
        return StallError(
            f"no executor made progress for {now_s - self._last_s:.0f} s (last progress: {beats or 'none yet'}); the stacks of all threads "
            f"are in {path}; if the run was only slow, raise watchdog.timeout_s above {self._timeout_s:.0f}"
        )

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            error = self.check()
            if error is not None:
                self._on_stall(error)
                return

    def __enter__(self) -> Watchdog:
        self._last_s = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def dump_stacks(run_dir: Path) -> Path:
    """Writes the stack of every thread to `stall_stacks.txt` and to stderr; returns the file's path."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE_NAME
    with path.open("w", encoding="utf-8") as file:
        for thread in threading.enumerate():
            file.write(f"thread 0x{thread.ident or 0:016x} is {thread.name}\n")
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    with contextlib.suppress(ValueError, OSError):  # stderr may be closed; the file is the record
        sys.stderr.write(path.read_text(encoding="utf-8"))
        sys.stderr.flush()
    return path
