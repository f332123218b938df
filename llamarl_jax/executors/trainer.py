"""The trainer: waits for a legal batch, takes one optimizer step, publishes the new weights, and keeps the books of the run.

Order inside a step: take the batch (the schedule checks its age once more), pack it, accumulate gradients, update, publish. The generator
is waiting for the weights, so they go out before metrics are read and checkpoints written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from llamarl_jax.channels import Channel
from llamarl_jax.checkpoint import Checkpointer
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.packing import pack
from llamarl_jax.losses.diagnostics import finish
from llamarl_jax.losses.normalisation import denominator
from llamarl_jax.metrics.batch import batch_metrics
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.models.transformer import Params
from llamarl_jax.schedule import SharedSchedule
from llamarl_jax.train_step import StepSums, TrainState, TrainStep
from llamarl_jax.types import TrajectoryBatch, TrajectoryGroup
from llamarl_jax.unfinished import Unfinished, to_plain
from llamarl_jax.weights.channel import SyncStats, WeightChannel


class NonFiniteGradientError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


class Trainer:
    """One executor on the trainer mesh; everything runs on its own thread."""

    def __init__(
        self,
        *,
        train_step: TrainStep,
        state: TrainState,
        reference: Params | None,
        row_length: int,
        max_new_tokens: int,
        schedule: SharedSchedule,
        cursor: PromptCursor,
        trajectories: Channel[TrajectoryGroup],
        weights: WeightChannel,
        checkpointer: Checkpointer,
        host_state: Mapping[str, Any],
        timeline: Timeline,
        counters: Counters,
        report: Callable[[int, dict[str, float]], None],
        heartbeat: Callable[[], None],
        received: Sequence[TrajectoryGroup] = (),
        unfinished: Channel[Unfinished] | None = None,
    ) -> None:
        """Joins the parts.

        Args:
            row_length: tokens of a packed row.
            max_new_tokens: longest completion, for the `constant` normalisation.
            host_state: plain data that goes into every checkpoint (the resolved config).
            report: takes the metrics of each committed step.
            received: groups that waited for a batch at the checkpoint that the run goes on from.
            unfinished: where the generator puts what goes into a checkpoint of a run in rounds; None in mode `in_flight`.
        """
        self.state = state
        self._train_step, self._reference = train_step, reference
        self._row_length, self._max_new_tokens = row_length, max_new_tokens
        self._schedule, self._cursor, self._trajectories, self._weights = schedule, cursor, trajectories, weights
        self._checkpointer, self._host_state = checkpointer, host_state
        self._timeline, self._counters, self._report, self._heartbeat = timeline, counters, report, heartbeat
        self._unfinished, self._latest = unfinished, None
        self._ready: dict[int, TrajectoryGroup] = {group.admission_index: group for group in received}
        self._num_skipped_in_a_row = 0

    def run(self) -> None:
        """Publishes the start version, then trains until the last step is committed."""
        version = self._schedule.start_version
        self._publish(version)
        for step in range(version, self._schedule.config.num_steps):
            groups = self._wait_for_batch()
            metrics = self._train(groups)
            sync = self._publish(step + 1)
            for group in groups:
                self._cursor.settle(group.admission_index)
            metrics |= batch_metrics(groups, step=step) | _sync_metrics(sync)
            if self._checkpointer.is_due(step + 1):
                self._save(step + 1)
            self._report(step, metrics)
            self._check_skipped(metrics, step)
            self._heartbeat()

    def _wait_for_batch(self) -> list[TrajectoryGroup]:
        """Returns the next legal batch. The reward executor completes a group in the schedule before it sends it on."""
        with self._timeline.wait("trainer", "batch"):
            indices = self._schedule.wait_next_batch()
        self._receive(indices)
        return [self._ready.pop(index) for index in sorted(indices)]

    def _receive(self, indices: Sequence[int]) -> None:
        """Takes trajectories until these groups are among them."""
        while not all(index in self._ready for index in indices):
            with self._timeline.wait("trainer", "batch"):
                group = self._trajectories.get()
            self._ready[group.admission_index] = group

    def _save(self, step: int) -> None:
        """Writes a checkpoint. In rounds, one that holds version s waits for the end of the last round before that of version s."""
        in_progress = {"cursor": self._cursor.state()} if self._unfinished is None else self._in_progress(self._unfinished, step)
        with self._timeline.span("trainer", "checkpoint"):
            self._checkpointer.save(step, self.state, {**self._host_state, **in_progress})

    def _in_progress(self, records: Channel[Unfinished], step: int) -> dict[str, Any]:
        """Returns prompts, completions and trajectories as they are when the round begins that is sampled with version `step`.

        Nothing stands still for it that would not do so anyway, as long as weights lag behind by one round at most: the trainer then
        needs the batch of the same round.
        """
        config = self._schedule.config
        while self._latest is None or self._latest.schedule.round_index < min(step + config.round_lag, config.num_steps):
            with self._timeline.wait("trainer", "end of round"):
                self._latest = records.get()
        record = self._latest.at_step(step)
        waiting = record.awaiting_trainer()
        self._receive(waiting)
        return {"unfinished": to_plain(dataclasses.replace(record, trajectories=tuple(self._ready[index] for index in waiting)))}

    def _train(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        config = self._train_step.config
        with self._timeline.span("trainer", "collate"):
            num_rows = config.rows_per_microbatch
            layout = partial(
                pack, row_length=self._row_length, num_rows_multiple=num_rows, packing=config.packing, step=self._schedule.step - 1
            )
            batch, _ = layout(groups)
            total = denominator(batch, config.normalisation, max_tokens=self._max_new_tokens)
            if config.leaves_out_zero_advantages:  # after the denominator, which counts them
                batch, _ = layout([_with_advantage(group) for group in groups])
        with self._timeline.span("trainer", "gradient"):
            sums: StepSums | None = None
            for first in range(0, len(batch.token_ids), num_rows):
                rows = TrajectoryBatch(*(x[first : first + num_rows] for x in batch))
                sums = self._train_step.accumulate(self.state.params, sums, self._train_step.place(rows), total, self._reference)
            assert sums is not None, "a batch has at least one row"
            self.state, device_metrics = self._train_step.update(self.state, sums)
            metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
        num_loss_tokens = float(np.sum(batch.loss_mask))
        return finish(metrics, num_loss_tokens) | {
            "trainer/num_loss_tokens": num_loss_tokens,
            "trainer/padding_share": float(np.mean(batch.segment_ids == 0)),
        }

    def _publish(self, version: int) -> SyncStats:
        with self._timeline.span("trainer", "publish"):
            return self._weights.publish(version, self.state.params)

    def _check_skipped(self, metrics: Mapping[str, float], step: int) -> None:
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if metrics["trainer/is_skipped"] else 0
        limit = self._train_step.config.max_skipped_steps
        if self._num_skipped_in_a_row > limit:
            raise NonFiniteGradientError(
                f"the gradient was not finite in {self._num_skipped_in_a_row} steps in a row, up to {step} (trainer.max_skipped_steps = "
                f"{limit}); the weights are those before the first of them: lower trainer.optimizer.learning_rate, or check the rewards"
            )


def _with_advantage(group: TrajectoryGroup) -> TrajectoryGroup:
    """Returns the group without the trajectories that cannot move the policy."""
    return dataclasses.replace(group, trajectories=tuple(t for t in group.trajectories if t.advantage != 0))


def _sync_metrics(sync: SyncStats) -> dict[str, float]:
    return {
        "sync/export_s": sync.export_s,
        "sync/transfer_s": sync.transfer_s,
        "sync/bytes": sync.num_bytes,
        "sync/is_verified": float(sync.is_verified),
    }
