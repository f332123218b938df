"""Puts one step's numbers together: the trainer's metrics, every executor's counters, and where the time went."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from llamarl_jax.metrics import names
from llamarl_jax.metrics.console import LiveView
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.metrics.writer import MetricsWriter


class RunReport:
    """Writes rows and redraws the live view; called from the trainer's and the generator's thread."""

    def __init__(self, writer: MetricsWriter, view: LiveView, timeline: Timeline, counters: Counters) -> None:
        self._writer, self._view, self._timeline, self._counters = writer, view, timeline, counters
        self._lock = threading.Lock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports a committed step."""
        totals = self._timeline.take_totals()
        row = {**metrics, **totals, **counter_metrics(self._counters.take(), totals[names.STEP_S])}
        row[names.TRAINED_TOKENS_PER_S] = metrics["trainer/num_loss_tokens"] / totals[names.STEP_S]
        with self._lock:
            self._writer.write(step, row)
            self._view.update(step, row)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation of a weight version."""
        with self._lock:
            self._writer.write(version, metrics)
            self._view.status(
                f"held-out accuracy of version {version}: {metrics[names.EVAL_ACCURACY]:.1%} "
                f"({metrics['eval/low']:.1%} to {metrics['eval/high']:.1%}, {metrics['eval/num_scored']:.0f} problems)"
            )


def counter_metrics(sums: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Turns the executors' sums of a step into metrics; a ratio whose denominator is 0 is left out."""
    metrics = {
        names.GENERATED_TOKENS_PER_S: sums.get("generated_tokens", 0.0) / wall_s,
        "generator/tokens": sums.get("generated_tokens", 0.0),
        "generator/prefill_tokens": sums.get("prefill_tokens", 0.0),
        "generator/prefill_s": sums.get("prefill_s", 0.0),
        "generator/decode_s": sums.get("decode_s", 0.0),
        "generator/tail_s": sums.get("tail_s", 0.0),
        "generator/num_aborted": sums.get("aborted", 0.0),
        "generator/num_carried": sums.get("carried", 0.0),
        "generator/carried_tokens": sums.get("carried_tokens", 0.0),
        "reward/num_scored": sums.get("scored", 0.0),
        "reward/num_failed": sums.get("failed", 0.0),
        "reward/num_dropped_groups": sums.get("dropped_groups", 0.0),
    }
    if sums.get("slot_steps"):
        metrics["generator/slot_utilisation"] = sums["generated_tokens"] / sums["slot_steps"]
    if busy_s := sums.get("prefill_s", 0.0) + sums.get("decode_s", 0.0):  # seconds that the decoder's devices worked for it
        metrics["generator/prefill_share"] = sums["prefill_s"] / busy_s
        metrics["generator/decode_share"] = sums["decode_s"] / busy_s
        metrics["generator/tail_share"] = sums["tail_s"] / busy_s
    if sums.get("scored"):
        metrics[names.REWARD_ALL] = sums["reward"] / sums["scored"]
    return metrics
