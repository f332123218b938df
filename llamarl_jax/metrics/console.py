"""Shows a run in the terminal: progress, reward, staleness, tokens per second, and where each executor's time goes.

On a terminal the view is redrawn in place. Elsewhere (a log file, CI, a notebook cell) redrawing would only fill the log, so one plain
line per step is printed.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from llamarl_jax.metrics import names

_SPARK = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 30

# label, metric, format; shown in this order where the metric is present
_SHOWN = (
    ("reward", names.REWARD_ALL, "{:.3f}"),
    ("trained on", names.REWARD_TRAINED, "{:.3f}"),
    ("staleness", names.STALENESS_MEAN, "{:.2f}"),
    ("oldest", names.STALENESS_MAX, "{:.0f}"),
    ("generated tok/s", names.GENERATED_TOKENS_PER_S, "{:,.0f}"),
    ("trained tok/s", names.TRAINED_TOKENS_PER_S, "{:,.0f}"),
    ("grad norm", names.GRAD_NORM, "{:.3g}"),
    ("largest ratio", names.RATIO_MAX, "{:.3g}"),
    ("entropy", names.ENTROPY, "{:.3f}"),
    ("eval accuracy", names.EVAL_ACCURACY, "{:.1%}"),
    ("step s", names.STEP_S, "{:.2f}"),
)


class LiveView:
    """The terminal's view of a run; a context manager."""

    def __init__(self, num_steps: int, *, is_live: bool = True, console: Console | None = None) -> None:
        """Prepares the view.

        Args:
            num_steps: steps of the whole run.
            is_live: redraw in place if the console is a terminal.
            console: where to draw; standard output by default.
        """
        self._console = console or Console()
        self._num_steps = num_steps
        self._rewards: collections.deque[float] = collections.deque(maxlen=_NUM_SPARKS)
        self._live: Live | None = None
        if is_live and self._console.is_terminal:
            self._progress, self._task = _progress_bar(self._console, num_steps)
            self._live = Live(self._progress, console=self._console, refresh_per_second=4)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step that has just ended (`step` counts from 0)."""
        if names.REWARD_ALL in metrics:
            self._rewards.append(metrics[names.REWARD_ALL])
        if self._live is None:
            self._print(format_line(step, self._num_steps, metrics))
            return
        self._progress.update(self._task, completed=step + 1, description="training")
        self._live.update(Group(self._progress, _numbers(metrics), self._spark_line(), _executors(metrics)))

    def status(self, text: str) -> None:
        """Says what the run is doing outside its steps, for instance compiling or evaluating."""
        if self._live is None:
            self._print(text)
        else:
            self._progress.update(self._task, description=text)

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _spark_line(self) -> Text:
        if not (self._console.encoding or "").lower().startswith("utf"):
            return Text("")
        return Text.assemble(("reward ", "dim"), (spark_line(list(self._rewards)), "green"), no_wrap=True, overflow="crop")


def format_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns the one plain line that stands for a step where nothing can be redrawn."""
    parts = [f"step {step + 1}/{num_steps}"]
    parts += [f"{label} {text.format(metrics[name])}" for label, name, text in _SHOWN if name in metrics]
    waits = [f"{executor} {metrics[names.wait_s(executor)]:.2f}" for executor in names.EXECUTORS if names.wait_s(executor) in metrics]
    if waits:
        parts.append("wait s: " + " ".join(waits))
    return " | ".join(parts)


def spark_line(values: list[float]) -> str:
    """Draws the values as one row of block characters between their minimum and maximum; a non-finite value leaves a gap."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, extent = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(_SPARK[int((value - low) / extent * (len(_SPARK) - 1))] if math.isfinite(value) else " " for value in values)


def _progress_bar(console: Console, num_steps: int) -> tuple[Progress, TaskID]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    return progress, progress.add_task("starting", total=num_steps)


def _numbers(metrics: Mapping[str, float]) -> Table:
    shown = [(label, text.format(metrics[name])) for label, name, text in _SHOWN if name in metrics]
    table = Table.grid(padding=(0, 2))
    for start in range(0, len(shown), 3):
        cells = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in shown[start : start + 3]]
        table.add_row(*cells)
    return table


def _executors(metrics: Mapping[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("executor", "busy", "wait", "unaccounted"):
        table.add_column(column, justify="left" if column == "executor" else "right", overflow="ellipsis")
    wall_s = metrics.get(names.STEP_S, 0.0)
    for executor in names.EXECUTORS:
        if names.busy_s(executor) not in metrics:
            continue
        seconds = [metrics.get(name(executor), 0.0) for name in (names.busy_s, names.wait_s, names.unaccounted_s)]
        table.add_row(executor, *(f"{value:.2f} s {value / wall_s:4.0%}" if wall_s > 0 else f"{value:.2f} s" for value in seconds))
    return table
