"""Writes the metrics of each step: JSON lines always, TensorBoard and Weights & Biases on request.

`metrics.jsonl` is the record; the other two are copies. Each line is one flushed, strictly valid JSON object, so that a killed run loses
at most the line it was writing:

    {"step": 3, "reward/mean_all": 0.41, "loss": null, "nonfinite": {"loss": "nan"}}

JSON has no NaN and no infinity. Such a value becomes `null`, and `nonfinite` says which it was, so that `read_metrics` restores it.

A resumed run continues the file. The steps after its checkpoint will be done again, so their rows are dropped first: a step never
appears twice with different numbers from one source.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

FILE_NAME = "metrics.jsonl"
WANDB_ID_FILE_NAME = "wandb_id.txt"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where the numbers of a run go."""

    use_tensorboard: bool = False
    """Also write TensorBoard event files into the run folder (needs the `tensorboard` extra)."""
    use_wandb: bool = False
    """Also log to Weights & Biases (needs the `wandb` extra and a login)."""
    wandb_project: str = "llamarl_jax"
    """Weights & Biases project that the run is filed under."""
    use_live_view: bool = True
    """Redraw a summary in the terminal; without a terminal, or when off, one plain line per step is printed."""
    write_plot: bool = True
    """Write run.png (reward, staleness, executors' timeline) at the end of the run."""


class MetricsWriter:
    """Appends one row per step to `metrics.jsonl` and to the optional sinks; use as a context manager or call `close`."""

    def __init__(
        self, run_dir: Path, config: MetricsConfig, *, first_step: int | None = None, run_config: Mapping[str, Any] | None = None
    ) -> None:
        """Opens the sinks.

        Args:
            run_dir: folder of the run; created if missing.
            config: which sinks to write.
            first_step: the first step that will be written after a resume; earlier rows are kept, rows from this step on are dropped.
                None starts a new record.
            run_config: the resolved config as plain data, shown by Weights & Biases.

        Raises:
            FileExistsError: `first_step` is None and the folder already holds metrics.
            ModuleNotFoundError: an optional sink is switched on and its package is missing.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        if first_step is None and path.exists() and path.stat().st_size > 0:
            raise FileExistsError(f"{path} already holds the metrics of a run; resume it (--resume), or choose another folder (--run-dir)")
        # Sinks whose package may be missing open before the file is touched: a failed start must not lose rows.
        self._sinks: list[tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]] = []
        if config.use_tensorboard:
            self._sinks.append(_open_tensorboard(run_dir, first_step))
        if config.use_wandb:
            self._sinks.append(_open_wandb(run_dir, config.wandb_project, run_config))
        if first_step is not None:
            _drop_rows_from(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Writes one row; a step has one row per source (training, evaluation), and sources may be out of step with each other.

        Raises:
            TypeError: a value is not a number.
        """
        values = {name: _as_float(name, value) for name, value in metrics.items()}
        self._file.write(_encode_row(step, values) + "\n")
        self._file.flush()
        for write, _ in self._sinks:
            write(step, values)

    def close(self) -> None:
        """Closes every sink."""
        self._file.close()
        for _, close in self._sinks:
            close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Reads the rows of a run, each with its `step`; non-finite values are restored and a half-written last line is ignored.

    Raises:
        FileNotFoundError: the folder holds no metrics.
        ValueError: a line other than the last is not a metrics row.
    """
    path = run_dir / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a run that wrote at least one step")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row.update({name: float(value) for name, value in row.pop("nonfinite", {}).items()})
        except (ValueError, AttributeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not a metrics row: {line[:80]!r}; remove the line") from error
        rows.append(row)
    return rows


def _as_float(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r} of type {type(value).__name__}; metrics are single numbers") from error


def _encode_row(step: int, values: Mapping[str, float]) -> str:
    row: dict[str, Any] = {"step": step}
    row.update({name: value if math.isfinite(value) else None for name, value in values.items()})
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    if nonfinite:
        row["nonfinite"] = nonfinite
    return json.dumps(row, allow_nan=False)


def _drop_rows_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = [row for row in read_metrics(path.parent) if row["step"] < first_step]
    text = "".join(_encode_row(int(row.pop("step")), row) + "\n" for row in kept)
    replacement = path.with_suffix(".tmp")
    replacement.write_text(text, encoding="utf-8")
    replacement.replace(path)  # atomic: a kill here leaves the old record or the new one


def _open_tensorboard(run_dir: Path, first_step: int | None) -> tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]:
    try:
        # Generated modules: a type checker finds no names in them.
        event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary_pb2: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics.use_tensorboard is on but the tensorboard package is not installed; run `pip install 'llamarl_jax[tensorboard]'`"
        ) from error
    events = EventFileWriter(str(run_dir / "tensorboard"))
    if first_step is not None:  # a START event makes TensorBoard hide what an earlier file says from this step on
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        events.add_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(step: int, values: Mapping[str, float]) -> None:
        summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        events.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    return write, events.close


def _open_wandb(
    run_dir: Path, project: str, run_config: Mapping[str, Any] | None
) -> tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]:
    try:
        import wandb  # pyright: ignore[reportMissingImports] - an extra that the development set does without
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics.use_wandb is on but the wandb package is not installed; run `pip install 'llamarl_jax[wandb]'`"
        ) from error
    id_file = run_dir / WANDB_ID_FILE_NAME
    run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
    run = wandb.init(project=project, dir=str(run_dir), id=run_id, resume="allow", config=dict(run_config or {}))
    id_file.write_text(run.id, encoding="utf-8")  # a resumed run continues the same curve

    def write(step: int, values: Mapping[str, float]) -> None:
        run.log(dict(values), step=step)

    return write, run.finish
