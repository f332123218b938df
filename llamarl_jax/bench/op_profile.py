"""Where the time of a decode step goes, by operation, read from a `jax.profiler` trace.

A trace names compiled operations only (`ynn_fusion.17`). The compiled programs that are alive say what each of them does, so operations
are listed by content: opcode, what is fused into it, result shape, and the named scopes of the source. The layers of a model then
fall together, and `calls` is how often such an operation runs in a step.

An operation that hands its work to other threads ends where its last piece does. Where several run, the time is that of the one which
began last: on CPU the thread that ends an operation may go on with what comes next before the trace says that the first has ended. What
lies between operations (dispatch, waiting) is the entry `(between operations)`, so the shares sum to 1.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from llamarl_jax.bench.hlo_text import Instruction, parse_hlo

BETWEEN = "(between operations)"


class Interval(NamedTuple):
    """One execution of an operation, in nanoseconds."""

    module: str
    name: str
    start: float
    end: float


def profile_ops(run: Callable[[], Any], num_steps: int) -> list[dict[str, Any]]:
    """Traces one call that runs `num_steps` decode steps.

    Returns:
        The operations, longest first: `name`, `step_ms` (per decode step), `share` (of the whole trace's span), `calls` (per decode step).
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        traces = list(Path(folder).rglob("*.xplane.pb"))
        intervals = [i for trace in traces for i in read_intervals(ProfileData.from_file(str(trace)))]
    return summarise(intervals, instructions_of(intervals), num_steps)


def read_intervals(data: Any) -> list[Interval]:
    """Returns every execution of an operation in a `ProfileData`: on the accelerator's timeline if there is one, else on the host's."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    started: dict[Any, Interval] = {}
    ended: dict[Any, float] = {}
    for plane in devices or planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith("end: "):
                    ended[stats.get("_c")] = event.start_ns
                elif "hlo_op" in stats:
                    key = stats.get("_p", ("no end marker", len(started)))
                    end = event.start_ns + event.duration_ns
                    started[key] = Interval(str(stats.get("hlo_module", "")), str(stats["hlo_op"]), event.start_ns, end)
    return [interval._replace(end=max(interval.end, ended.get(key, 0.0))) for key, interval in started.items()]


def summarise(intervals: Iterable[Interval], instructions: dict[tuple[str, str], Instruction], num_steps: int) -> list[dict[str, Any]]:
    """Adds up executions by content; containers are left out."""
    leaves = [i for i in intervals if not (known := instructions.get((i.module, i.name))) or not known.is_container]
    if not leaves:
        return []
    first, last = min(i.start for i in leaves), max(i.end for i in leaves)
    seconds: dict[str, float] = collections.defaultdict(float)
    calls: collections.Counter[str] = collections.Counter()
    for interval, duration in zip(leaves, exclusive_durations(leaves), strict=True):
        known = instructions.get((interval.module, interval.name))
        label = known.label if known else interval.name
        seconds[label] += duration
        calls[label] += 1
    seconds[BETWEEN] = (last - first) - sum(seconds.values())
    return [
        {"name": name, "step_ms": ns / 1e6 / num_steps, "share": ns / (last - first), "calls": calls[name] / num_steps}
        for name, ns in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def exclusive_durations(intervals: Sequence[Interval]) -> list[float]:
    """Returns how long each interval lasts while none that began later does; they sum to the length of the union."""
    durations = [0.0] * len(intervals)
    waiting = sorted(range(len(intervals)), key=lambda i: -intervals[i].start)
    active: list[tuple[float, int]] = []  # a heap, the one that began last first
    times = sorted({time for interval in intervals for time in (interval.start, interval.end)})
    for now, then in itertools.pairwise(times):
        while waiting and intervals[waiting[-1]].start <= now:
            number = waiting.pop()
            heapq.heappush(active, (-intervals[number].start, number))
        while active and intervals[active[0][1]].end <= now:
            heapq.heappop(active)
        if active:
            durations[active[0][1]] += then - now
    return durations


def instructions_of(intervals: Iterable[Interval]) -> dict[tuple[str, str], Instruction]:
    """Finds the compiled programs of a trace among those alive and returns their operations by (module, name).

    Where several programs have the module's name (other batch sizes), the one with the most of the operations that ran is taken, the newest
    of those.
    """
    names: dict[str, set[str]] = collections.defaultdict(set)
    for interval in intervals:
        names[interval.module].add(interval.name)
    best: dict[str, tuple[int, dict[str, Instruction]]] = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                found = parse_hlo(module.to_string())
                score = len(names[module.name] & found.keys())
                if score >= best.get(module.name, (0, {}))[0]:
                    best[module.name] = (score, found)
    return {(module, name): instruction for module, (_, found) in best.items() for name, instruction in found.items()}
