"""Tells how much of the machine other processes used during a timed run, since a busy neighbour spoils a benchmark unseen.

Linux says how long all cores were busy and how long each process ran; the difference is other processes and, on a virtual machine, time
that the host took away. Elsewhere nothing is known and 0 is reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")

MAX_TRIES = 8
PATIENCE_S = 300.0
"""Longest wait for a quiet machine before each try."""

_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of the first line of /proc/stat: user, nice, system, irq, softirq, steal."""
_OWN = (11, 12)
"""Fields behind the name in /proc/PID/stat: user and system time."""


def watched(run: Callable[[], ResultT], pids: Sequence[int]) -> tuple[ResultT, float]:
    """Runs a function; returns its result and the share of all cores that processes other than `pids` used meanwhile."""
    if not Path("/proc/stat").is_file():
        return run(), 0.0
    start, busy, own = time.perf_counter(), _busy_ticks(), _own_ticks(pids)
    result = run()
    ticks = (_busy_ticks() - busy) - (_own_ticks(pids) - own)
    return result, ticks_to_share(ticks, time.perf_counter() - start)


def undisturbed(run: Callable[[], ResultT], pids: Sequence[int], max_share: float, say: Callable[[str], None]) -> tuple[ResultT, float]:
    """Runs a function, when the machine is quiet, until other processes used no more than `max_share` of all cores meanwhile.

    Returns:
        The result of the least disturbed run, and its disturbance.
    """
    tries: list[tuple[ResultT, float]] = []
    while len(tries) < MAX_TRIES:
        wait_until_quiet(max_share)
        tries.append(watched(run, pids))
        if tries[-1][1] <= max_share:
            break
        say(f"  other processes used {tries[-1][1]:.0%} of the cores meanwhile; once more")
    return min(tries, key=lambda result: result[1])


def wait_until_quiet(max_share: float) -> None:
    """Waits until other processes used no more than a share of all cores for a second, or the time is up."""
    end = time.perf_counter() + PATIENCE_S
    while max_share < 1 and time.perf_counter() < end and watched(lambda: time.sleep(1.0), [os.getpid()])[1] > max_share:
        pass


def ticks_to_share(ticks: int, seconds: float) -> float:
    """Returns clock ticks of busy cores as a share of all cores; two ticks a core are within the error of the counters."""
    cores, per_s = os.cpu_count() or 1, os.sysconf("SC_CLK_TCK")
    return max(0.0, (ticks - 2 * cores) / per_s / (cores * seconds))


def _busy_ticks() -> int:
    numbers = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    return sum(int(numbers[i]) for i in _BUSY)


def _own_ticks(pids: Sequence[int]) -> int:
    fields = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in pids]
    return sum(int(numbers[i]) for numbers in fields for i in _OWN)
