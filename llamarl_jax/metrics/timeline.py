"""Records what each executor does when, so that every second of a step is work, waiting, or visibly unexplained.

An executor wraps what it does:

    with timeline.span("trainer", "gradient"): ...
    with timeline.wait("trainer", "batch"): ...

`take_totals` closes the books of a step. For an executor with one thread

    busy + wait + unaccounted = wall

holds exactly: a span inside another of the same executor takes its seconds from the outer one, and a span that is still open when the
books close is split there. Seconds in which an executor's spans of several threads overlap are counted once for `unaccounted`.

Times are host times. Dispatching a device program returns at once; wrap the place that waits for its result.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llamarl_jax.metrics import names

FILE_NAME = "timeline.jsonl"


class Span(NamedTuple):
    """One interval: seconds since the timeline began."""

    executor: str
    kind: str
    is_wait: bool
    start_s: float
    end_s: float


@dataclass
class _Executor:
    """Running account of one executor since the books were last closed; guarded by the timeline's lock."""

    covered_since_s: float = 0.0  # when the number of open spans last left zero
    covered_s: float = 0.0
    num_open: int = 0
    totals_s: dict[tuple[str, bool], float] = field(default_factory=dict)  # (kind, is_wait) -> seconds


@dataclass
class _Open:
    """An open span; `mark_s` is the time up to which its seconds are already in the totals."""

    kind: str
    is_wait: bool
    mark_s: float


class Timeline:
    """Thread-safe recorder of intervals."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, max_spans: int = 50_000) -> None:
        """Starts the record.

        Args:
            clock: seconds from any origin, never decreasing.
            max_spans: how many of the newest spans to keep for the picture; the totals count all of them.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._origin_s = clock()
        self._closed_s = self._origin_s
        self._spans: collections.deque[Span] = collections.deque(maxlen=max_spans)
        self._executors: dict[str, _Executor] = {}
        self._stacks: dict[tuple[int, str], list[_Open]] = {}  # open spans of each (thread, executor), innermost last

    def span(self, executor: str, kind: str) -> contextlib.AbstractContextManager[None]:
        """Records the body as work of this kind."""
        return self._record(executor, kind, is_wait=False)

    def wait(self, executor: str, kind: str) -> contextlib.AbstractContextManager[None]:
        """Records the body as waiting for this kind of thing."""
        return self._record(executor, kind, is_wait=True)

    @contextlib.contextmanager
    def _record(self, executor: str, kind: str, *, is_wait: bool) -> Iterator[None]:
        key = (threading.get_ident(), executor)
        with self._lock:
            start_s = self._clock()
            account = self._executors.setdefault(executor, _Executor())
            stack = self._stacks.setdefault(key, [])
            if stack:
                _charge(account, stack[-1], start_s)
            if account.num_open == 0:
                account.covered_since_s = start_s
            account.num_open += 1
            stack.append(_Open(kind, is_wait, start_s))
        try:
            yield
        finally:
            with self._lock:
                end_s = self._clock()
                _charge(account, stack.pop(), end_s)
                if stack:
                    stack[-1].mark_s = end_s
                else:
                    del self._stacks[key]
                account.num_open -= 1
                if account.num_open == 0:
                    account.covered_s += end_s - account.covered_since_s
                self._spans.append(Span(executor, kind, is_wait, start_s - self._origin_s, end_s - self._origin_s))

    def take_totals(self) -> dict[str, float]:
        """Returns the seconds since the last call, and starts the next account.

        Returns:
            `time/<executor>_{busy,wait,unaccounted}_s`, `time/<executor>_{busy,wait}_s/<kind>` (spaces become underscores) and
            `time/step_s` (the wall time).
        """
        with self._lock:
            now_s = self._clock()
            for (_, executor), stack in self._stacks.items():
                _charge(self._executors[executor], stack[-1], now_s)
            wall_s = now_s - self._closed_s
            metrics = {names.STEP_S: wall_s}
            for executor, account in self._executors.items():
                if account.num_open:
                    account.covered_s += now_s - account.covered_since_s
                    account.covered_since_s = now_s
                metrics.update(_account_metrics(executor, account, wall_s))
                account.covered_s = 0.0
                account.totals_s = {}
            self._closed_s = now_s
        return metrics

    def spans(self) -> list[Span]:
        """Returns the newest closed spans in the order in which they ended."""
        with self._lock:
            return list(self._spans)

    def save(self, run_dir: Path) -> Path:
        """Writes the spans of this process to `timeline.jsonl` of the run folder and returns its path."""
        path = run_dir / FILE_NAME
        path.write_text("".join(json.dumps(span) + "\n" for span in self.spans()), encoding="utf-8")
        return path


def read_spans(run_dir: Path) -> list[Span]:
    """Reads what `Timeline.save` wrote; an absent file gives no spans."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    return [Span(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _charge(account: _Executor, span: _Open, now_s: float) -> None:
    key = (span.kind, span.is_wait)
    account.totals_s[key] = account.totals_s.get(key, 0.0) + now_s - span.mark_s
    span.mark_s = now_s


def _account_metrics(executor: str, account: _Executor, wall_s: float) -> dict[str, float]:
    busy_s = sum(seconds for (_, is_wait), seconds in account.totals_s.items() if not is_wait)
    wait_s = sum(seconds for (_, is_wait), seconds in account.totals_s.items() if is_wait)
    metrics = {
        names.busy_s(executor): busy_s,
        names.wait_s(executor): wait_s,
        names.unaccounted_s(executor): wall_s - account.covered_s,
    }
    for (kind, is_wait), seconds in account.totals_s.items():
        name = names.wait_s(executor) if is_wait else names.busy_s(executor)
        metrics[f"{name}/{kind.replace(' ', '_')}"] = seconds
    return metrics
