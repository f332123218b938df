"""The outcome of `llamarl bench mismatch`: a table on the terminal and the values of a JSON file."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llamarl_jax.bench.distance import Distance
from llamarl_jax.bench.mismatch_options import MismatchOptions
from llamarl_jax.bench.report import plain_facts

COLUMNS = ("mode", "KV cache", "MB", "KV B", "mean |Δ|", "max |Δ|", "KL", "ESS", "same")


@dataclass(frozen=True, kw_only=True)
class VariantRow:
    """One decoder.

    Attributes:
        mode, kv_dtype: of its weights and its cache, as in the options.
        weight_bytes: of one copy of its weights, which is what each update moves.
        cache_token_bytes: of one token in the KV cache of all layers.
        distance: to the trainer.
    """

    mode: str
    kv_dtype: str
    weight_bytes: int
    cache_token_bytes: int
    distance: Distance


@dataclass(kw_only=True)
class MismatchReport:
    """Everything that was measured so far.

    Attributes:
        model, origin: name and where the weights come from.
        num_tokens: completion tokens, over which all means are taken.
        batch_fingerprint: hash of the batch's ids; only rows with equal ones compare exactly.
        rows_per_chunk: rows that went through the head at once.
        recorded: mean and maximum of |log π − log μ| in nats, where the engine noted log μ when it sampled the batch.
    """

    started: datetime.datetime
    model: str
    origin: str
    options: MismatchOptions
    hardware: dict[str, Any]
    versions: dict[str, str]
    num_tokens: int
    batch_fingerprint: str
    rows_per_chunk: int
    recorded: tuple[float, float]
    rows: list[VariantRow] = field(default_factory=list)


def print_report(report: MismatchReport, console: Console) -> None:
    """Prints what was measured, the table, and what its columns mean."""
    options, (mean, largest) = report.options, report.recorded
    console.print(
        f"\n{report.model} ({report.origin}), decoder {options.dtype}, trainer float32; {options.num_prompts} prompts, "
        f"{report.num_tokens:,} completion tokens at temperature 1, seed {options.seed}, batch {report.batch_fingerprint}",
        f"as the engine noted them when it sampled the batch, nothing rounded: |Δ| mean {_nats(mean)}, max {_nats(largest)}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="trainer π and decoder μ on the same tokens", box=box.SIMPLE, padding=0)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print(
        "mode: of the weights; MB: one copy of them, which an update moves; KV B: bytes of a token in the KV cache; Δ: log π − log μ of "
        "the tokens, in nats; KL(μ ‖ π), in nats per token, and ESS, the effective sample size of the ratios π/μ (1 at best), are exact "
        "over the vocabulary; same: share of equal greedy choices",
        highlight=False,
        soft_wrap=True,
    )


def as_plain(report: MismatchReport) -> dict[str, Any]:
    """Returns the report as JSON values."""
    facts = plain_facts("mismatch", report)
    facts["settings"]["prompts"] = facts["settings"]["prompts"] or "built in"
    return {
        **facts,
        "batch": {"completion_tokens": report.num_tokens, "fingerprint": report.batch_fingerprint, "rows_per_chunk": report.rows_per_chunk},
        "engine_record": {"logprob_abs_mean": report.recorded[0], "logprob_abs_max": report.recorded[1]},
        "rows": [_plain_row(row) for row in report.rows],
    }


def _plain_row(row: VariantRow) -> dict[str, Any]:
    values = asdict(row)
    return {**{name: value for name, value in values.items() if name != "distance"}, **values["distance"]}


def _cells(row: VariantRow) -> tuple[str, ...]:
    distance = row.distance
    return (
        row.mode,
        row.kv_dtype,
        f"{row.weight_bytes / 1e6:,.1f}",
        f"{row.cache_token_bytes:,}",
        _nats(distance.logprob_abs_mean),
        _nats(distance.logprob_abs_max),
        _nats(distance.kl),
        f"{distance.effective_sample_size:.3f}",
        f"{distance.greedy_agreement:.1%}",
    )


def _nats(value: float) -> str:
    """Writes small distances with an exponent: 0.00 would hide whether anything was rounded."""
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.0e}"
