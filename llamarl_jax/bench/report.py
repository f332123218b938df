"""The outcome of `llamarl bench decode`: a table on the terminal and a JSON file with every number behind it."""

from __future__ import annotations

import datetime
import functools
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from llamarl_jax.bench.decode_cost import StepCost
from llamarl_jax.bench.limits import DeviceLimits
from llamarl_jax.bench.machine import short_name
from llamarl_jax.bench.options import DecodeOptions
from llamarl_jax.bench.sample import OURS, Row, find_row

NUM_OPS = 12


@dataclass(kw_only=True)
class DecodeReport:
    """Everything that was measured so far.

    Attributes:
        model, origin: name and where the weights come from.
        load_average: of the minute before.
        costs: least work of a step, by batch.
        rows: ours first at each batch.
        left_out: peers without a row, with the reason.
        profiles: by batch, the operations of a step, the longest first.
    """

    started: datetime.datetime
    model: str
    origin: str
    options: DecodeOptions
    hardware: dict[str, Any]
    versions: dict[str, str]
    load_average: float | None
    costs: dict[int, StepCost] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    profiles: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, batch: int, cost: StepCost, rows: list[Row], profile: list[dict[str, Any]], left_out: dict[str, str]) -> None:
        """Adds one batch."""
        self.costs[batch], self.left_out = cost, left_out
        self.rows += rows
        if profile:
            self.profiles[batch] = profile

    @property
    def limits(self) -> DeviceLimits:
        """The highest rates that were measured beside any run."""
        return functools.reduce(DeviceLimits.best, (sample.limits for row in self.rows for sample in row.samples if sample.limits))

    def limit_share(self, row: Row) -> float | None:
        """Returns the least time of a step at the rates measured beside a run over that run's, as the median of the runs.

        None for peers, whose cache or weights may have another type.
        """
        shares = [
            self.costs[row.batch].limit_s(sample.limits.read_bytes_per_s, sample.limits.matmul_flops_per_s) / sample.step_s
            for sample in row.samples
            if sample.limits
        ]
        return statistics.median(shares) if shares else None

    def ratio(self, row: Row) -> float | None:
        """Returns our decode rate over this row's at the same batch; None where ours is missing."""
        ours = find_row(self.rows, OURS, row.batch)
        return None if ours is None else ours.decode_tokens_per_s / row.decode_tokens_per_s


def print_report(report: DecodeReport, console: Console) -> None:
    """Prints the limits, the table, what was left out, and the profiles."""
    machine = report.hardware
    console.print(
        f"\n{report.model} ({report.origin}), {_types(report.options)}, {report.options.kernels} kernels, "
        f"{report.options.prompt_tokens} + {report.options.new_tokens} tokens{_sharing(report.options)}{_ahead(report.options)}",
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores; load average before: {report.load_average}",
        _rates(report.limits),
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report))
    for name, reason in report.left_out.items():
        console.print(f"{name} left out: {reason}", highlight=False, markup=False, soft_wrap=True)
    for batch, ops in report.profiles.items():
        console.print(_profile_table(batch, ops))


def report_path(report: DecodeReport) -> Path:
    """Returns a file name that is not taken yet, with day, model, type and hardware in it."""
    return new_path(report.options.output_dir, report.started, "decode", report.model, report.options.dtype, report.hardware)


def new_path(folder: Path, started: datetime.datetime, benchmark: str, model: str, dtype: str, hardware: dict[str, Any]) -> Path:
    """Returns the name of a benchmark's file; a number is added where it is taken."""
    name = f"{started.strftime('%Y-%m-%d')}-{benchmark}-{model.replace('/', '-')}-{dtype}-{short_name(hardware)}"
    path, number = folder / f"{name}.json", 2
    while path.exists():
        path, number = folder / f"{name}-{number}.json", number + 1
    return path


def save_report(report: DecodeReport, path: Path) -> None:
    """Writes the JSON file."""
    write_json(as_plain(report), path)


def write_json(values: dict[str, Any], path: Path) -> None:
    """Writes a benchmark's numbers and makes the folder; NaN and infinity are refused, because JSON has neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")


class RunFacts(Protocol):
    """What the reports of all benchmarks say of their run; `options` is a dataclass with `model` and `output_dir`."""

    started: datetime.datetime
    model: str
    origin: str
    options: Any
    hardware: dict[str, Any]
    versions: dict[str, str]


def plain_facts(benchmark: str, report: RunFacts) -> dict[str, Any]:
    """Returns the start of a benchmark's JSON file; the settings leave out the folders of this machine."""
    settings = {name: value for name, value in asdict(report.options).items() if name not in ("model", "output_dir")}
    return {
        "benchmark": benchmark,
        "started": report.started.isoformat(timespec="seconds"),
        "model": report.model,
        "weights": report.origin,
        "settings": {name: value.name if isinstance(value, Path) else value for name, value in settings.items()},
        "hardware": report.hardware,
        "versions": report.versions,
    }


def as_plain(report: DecodeReport) -> dict[str, Any]:
    """Returns the report as JSON values."""
    return {
        **plain_facts("decode", report),
        "load_average_before": report.load_average,
        "limits": asdict(report.limits),
        "least_work_of_a_step": {str(batch): asdict(cost) for batch, cost in report.costs.items()},
        "rows": [_plain_row(row, report) for row in report.rows],
        "left_out": report.left_out,
        "profiles": {str(batch): ops for batch, ops in report.profiles.items()},
    }


def _plain_row(row: Row, report: DecodeReport) -> dict[str, Any]:
    names = ("decode_tokens_per_s", "step_s", "prefill_s", "total_s")
    repeats = [
        {
            **{name: getattr(sample, name) for name in names},
            "decode_steps": sample.decode_steps,
            "disturbance": sample.disturbance,
            "limits": asdict(sample.limits) if sample.limits else None,
        }
        for sample in row.samples
    ]
    return {
        "runner": row.runner,
        "batch": row.batch,
        "median": {name: row.median(name) for name in names},
        "ours_over_this": report.ratio(row),
        "share_of_limit": report.limit_share(row),
        "tokens_equal_to_ours": row.agreement,
        "repeats": repeats,
    }


def _table(report: DecodeReport) -> Table:
    table = Table(title=f"decoding, medians of {report.options.repeats} runs", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("batch", "", "tok/s", "ours/this", "step ms", "limit", "prefill s", "same"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in report.rows:
        ratio, limit_share = report.ratio(row), report.limit_share(row)
        table.add_row(
            str(row.batch),
            row.runner,
            f"{row.decode_tokens_per_s:,.1f}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{row.median('step_s') * 1e3:,.2f}",
            "" if limit_share is None else f"{limit_share:.0%}",
            f"{row.median('prefill_s'):.2f}",
            f"{row.agreement:.0%}",
            end_section=row.batch != _next_batch(report, row),
        )
    return table


def _next_batch(report: DecodeReport, row: Row) -> int | None:
    index = report.rows.index(row) + 1
    return report.rows[index].batch if index < len(report.rows) else None


def _profile_table(batch: int, ops: list[dict[str, Any]]) -> Table:
    table = Table(title=f"batch {batch}: time of a decode step by operation", box=box.SIMPLE, pad_edge=False)
    for column in ("ms", "share", "calls", "operation"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for op in ops[:NUM_OPS]:
        table.add_row(f"{op['step_ms']:.3f}", f"{op['share']:.1%}", f"{op['calls']:.0f}", op["name"])
    return table


def _rates(limits: DeviceLimits) -> str:
    return (
        f"best rates beside the runs: reads {limits.read_bytes_per_s / 1e9:,.1f} GB/s, copies {limits.copy_bytes_per_s / 1e9:,.1f} GB/s, "
        f'matmul {limits.matmul_flops_per_s / 1e9:,.0f} GFLOP/s; "limit" is what those beside a run would allow'
    )


def _sharing(options: DecodeOptions) -> str:
    if options.samples_per_prompt == options.slots_per_prompt == 1:
        return ""
    return f", {options.samples_per_prompt} samples of a prompt, slots_per_prompt {options.slots_per_prompt}"


def _ahead(options: DecodeOptions) -> str:
    return f", {options.dispatch_ahead} calls ahead" if options.dispatch_ahead else ""


def _types(options: DecodeOptions) -> str:
    weights = options.dtype if options.quantization == "none" else f"{options.dtype}-{options.quantization}"
    return weights if options.kv_dtype == "same" else f"{weights}, {options.kv_dtype} cache"
