"""Draws one picture of a run: reward, staleness, where each executor's time went, and a close-up of their timeline.

The close-up covers the last few steps, because at the scale of a whole run the spans merge into solid bars. Colours are Okabe and Ito's,
which people with any common colour blindness can tell apart; waiting is pale *and* hatched, so that it survives a grey print.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl_jax.metrics import names
from llamarl_jax.metrics.timeline import Span, read_spans
from llamarl_jax.metrics.writer import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "run.png"

_COLOURS = {"generator": "#0072B2", "reward": "#E69F00", "trainer": "#009E73", "weights": "#CC79A7"}
_OTHER_COLOUR = "#56B4E9"
_STALENESS_COLOURS = ("#D6E6F4", "#9DC6E0", "#5BA3CF", "#2A7AB9", "#0B4F93", "#08306B")
_GREY = "#666666"
_NUM_STEPS_SHOWN = 6
_MIN_LABEL_SHARE = 0.045  # a bar narrower than this share of the window gets no text

Rows = list[dict[str, float]]


def plot_run(run_dir: Path) -> Path:
    """Writes `run.png` into the run folder from its metrics and, where present, its timeline; returns the path.

    Raises:
        FileNotFoundError: the folder holds no metrics.
    """
    from matplotlib.figure import Figure  # half a second, and only needed at the end of a run

    rows = read_metrics(run_dir)
    spans = read_spans(run_dir)
    figure = Figure(figsize=(12, 8), dpi=130, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1), height_ratios=(1.15, 1))
    _draw_reward(figure.add_subplot(grid[0, 0]), rows)
    _draw_staleness(figure.add_subplot(grid[0, 1]), rows)
    executors = _executors_of(rows, spans)
    _draw_shares(figure.add_subplot(grid[1, 0]), rows, executors)
    _draw_timeline(figure.add_subplot(grid[1, 1]), rows, spans, executors)
    figure.suptitle(run_dir.resolve().name, fontsize=12, fontweight="bold")
    path = run_dir / FILE_NAME
    figure.savefig(path)
    return path


def _column(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Returns the steps and values of the rows that hold a finite value of this name."""
    pairs = [(row["step"], row[name]) for row in rows if name in row and math.isfinite(row[name])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _smooth(values: list[float]) -> list[float]:
    """Averages over a trailing window of a twelfth of the run."""
    width = max(1, len(values) // 12)
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _say_nothing_recorded(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing recorded", ha="center", va="center", color=_GREY, transform=axes.transAxes)


def _integer_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_reward(axes: Axes, rows: Rows) -> None:
    steps, rewards = _column(rows, names.REWARD_ALL)
    if steps:
        axes.plot(steps, rewards, color=_COLOURS["generator"], alpha=0.35, linewidth=1, label="each step")
        axes.plot(
            steps, _smooth(rewards), color=_COLOURS["generator"], linewidth=2.2, marker="." if len(steps) < 4 else "", label="trailing mean"
        )
    steps, rewards = _column(rows, names.REWARD_TRAINED)
    if steps:
        axes.plot(steps, _smooth(rewards), color="#D55E00", linewidth=1.5, linestyle="--", label="trained on, trailing mean")
    steps, accuracies = _column(rows, names.EVAL_ACCURACY)
    if steps:
        axes.plot(steps, accuracies, "D", color="black", markersize=6, label="held-out accuracy")
    if axes.lines:
        axes.legend(fontsize=8, frameon=False, loc="best")
        axes.grid(axis="y", alpha=0.25)
        _integer_ticks(axes)
    else:
        _say_nothing_recorded(axes)
    _finish(axes, "Reward", "step", "mean reward per completion")


def _draw_staleness(axes: Axes, rows: Rows) -> None:
    prefix = names.staleness_share(0).removesuffix("0")
    largest = max((int(name.removeprefix(prefix)) for row in rows for name in row if name.startswith(prefix)), default=-1)
    shown = [row for row in rows if any(name.startswith(prefix) for name in row)]  # a share of zero may be absent
    steps = [row["step"] for row in shown]
    base = [0.0] * len(shown)
    for staleness in range(largest + 1):
        shares = [row.get(names.staleness_share(staleness), 0.0) for row in shown]
        colour = _STALENESS_COLOURS[min(staleness, len(_STALENESS_COLOURS) - 1)]
        axes.bar(
            steps, shares, bottom=base, width=1.0, color=colour, label=f"{staleness} versions old" if staleness != 1 else "1 version old"
        )
        base = [low + share for low, share in zip(base, shares, strict=True)]
    if shown:
        axes.set_ylim(0, 1)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(4, largest + 1), frameon=False)
        _integer_ticks(axes)
    elif any(names.STALENESS_MEAN in row for row in rows):
        axes.plot(*_column(rows, names.STALENESS_MEAN), color=_COLOURS["generator"], label="mean")
        axes.plot(*_column(rows, names.STALENESS_MAX), color="#D55E00", linestyle="--", label="largest")
        axes.legend(fontsize=8, frameon=False)
    else:
        _say_nothing_recorded(axes)
    _finish(axes, "Staleness of what was trained on (oldest token)", "step", "share of trajectories" if shown else "versions")


def _executors_of(rows: Rows, spans: list[Span]) -> list[str]:
    """Lists the executors in the order of `names.EXECUTORS`, unknown ones last."""
    found = {span.executor for span in spans} | {name for name in names.EXECUTORS if any(names.busy_s(name) in row for row in rows)}
    return [name for name in names.EXECUTORS if name in found] + sorted(found - set(names.EXECUTORS))


def _draw_shares(axes: Axes, rows: Rows, executors: list[str]) -> None:
    wall_s = sum(row.get(names.STEP_S, 0.0) for row in rows)
    if not executors or wall_s <= 0:
        _say_nothing_recorded(axes)
    for i, executor in enumerate(executors if wall_s > 0 else []):
        colour, left = _COLOURS.get(executor, _OTHER_COLOUR), 0.0
        styles: tuple[tuple[Callable[[str], str], dict[str, Any]], ...] = (
            (names.busy_s, {"color": colour}),
            (names.wait_s, {"facecolor": colour, "alpha": 0.3, "hatch": "////", "edgecolor": colour}),
            (names.unaccounted_s, {"facecolor": "white", "edgecolor": "#BBBBBB"}),
        )
        for name, style in styles:
            share = sum(row.get(name(executor), 0.0) for row in rows) / wall_s
            axes.barh(i, share, left=left, height=0.62, linewidth=0.8, **style)
            if share > 0.08:
                text_colour = "white" if name is names.busy_s and executor != "reward" else "black"
                axes.text(left + share / 2, i, f"{share:.0%}", ha="center", va="center", fontsize=9, color=text_colour)
            left += share
    _label_executors(axes, executors)
    axes.set_xlim(0, 1)
    _finish(axes, "Where the time went (solid busy, hatched waiting, white not recorded)", "share of the run's wall time", "")


def _label_executors(axes: Axes, executors: list[str]) -> None:
    axes.set_yticks(range(len(executors)), executors)
    axes.set_ylim(max(len(executors), 1) - 0.5, -0.5)


def _draw_timeline(axes: Axes, rows: Rows, spans: list[Span], executors: list[str]) -> None:
    if not spans:
        _say_nothing_recorded(axes)
        _finish(axes, "Timeline", "seconds", "")
        return
    end_s = max(span.end_s for span in spans if not span.is_wait) if any(not span.is_wait for span in spans) else spans[-1].end_s
    step_s = [row[names.STEP_S] for row in rows if names.STEP_S in row]
    width_s = min(end_s, _NUM_STEPS_SHOWN * statistics.median(step_s)) if step_s else end_s
    start_s = end_s - width_s
    # Outer spans first: an inner one, which ends earlier, must not be hidden by the one around it.
    visible = sorted((span for span in spans if span.end_s > start_s and span.start_s < end_s), key=lambda span: span.start_s - span.end_s)
    for span in visible:
        colour = _COLOURS.get(span.executor, _OTHER_COLOUR)
        left, right = max(span.start_s, start_s), min(span.end_s, end_s)
        style: dict[str, Any] = {"facecolor": "white", "hatch": "////", "alpha": 0.45} if span.is_wait else {"facecolor": colour}
        y = executors.index(span.executor)
        axes.barh(y, right - left, left=left, height=0.62, linewidth=0.5, edgecolor=colour if span.is_wait else "white", **style)
        if not span.is_wait and right - left > _MIN_LABEL_SHARE * width_s and len(span.kind) * 0.012 * width_s < right - left:
            axes.text((left + right) / 2, y, span.kind, ha="center", va="center", fontsize=7, color="white", clip_on=True)
    _label_executors(axes, executors)
    axes.set_xlim(start_s, end_s)
    _finish(axes, f"Timeline of the last {width_s:.1f} s: solid busy, hatched waiting", "seconds since the start of the run", "")
