"""Carries weight versions from the trainer to the generator: export, transfer, swap.

`publish` runs on the trainer's thread: it exports a version on the trainer mesh and copies it to the generator mesh, bucket by bucket,
and stages it whole. `take` and `take_newest` run on the generator's thread: they hand a staged version over, after which the generator
puts it in force between two decode calls by one assignment. Nothing half-written is ever visible, and a version has its number from the
trainer's committed steps, not from a count of calls.

In `boundary` mode every version is kept, in order, until it is taken; the staleness bound limits them to S − C + 1. In `in_flight` mode a
new version replaces one that was not taken yet, so at most one waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from llamarl_jax.channels import Channel
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.models.transformer import Params
from llamarl_jax.weights.export import WeightExporter, WeightsConfig, checksums, merge


@dataclass(frozen=True, kw_only=True)
class SyncStats:
    """What one publication cost: seconds of each phase and bytes of one copy of the weights."""

    version: int
    export_s: float
    transfer_s: float
    num_bytes: int
    is_verified: bool


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """One staged version on the generator mesh; `digests` are the trainer's checksums where they were asked for."""

    version: int
    params: Params
    digests: Params | None
    stats: SyncStats


class WeightMismatchError(RuntimeError):
    """The generator received other weights than the trainer sent."""


class WeightChannel:
    """Single producer (trainer), single consumer (generator)."""

    def __init__(
        self,
        exporter: WeightExporter,
        channel: Channel[WeightUpdate],
        config: WeightsConfig,
        timeline: Timeline,
        *,
        keeps_only_newest: bool,
    ) -> None:
        """Joins an exporter to a bounded channel that the run's failure closes."""
        self._exporter, self._channel, self._config, self._timeline = exporter, channel, config, timeline
        self._keeps_only_newest = keeps_only_newest
        self._digest = jax.jit(checksums)
        self._num_published = 0

    def publish(self, version: int, params: Params) -> SyncStats:
        """Exports, moves and stages `params` as `version`; returns when they lie on the generator's devices.

        Args:
            version: committed optimizer steps behind these weights.
            params: float32 weights on the trainer mesh; the caller may donate them as soon as this returns.
        """
        is_verified = self._config.verify == "always" or (self._config.verify == "first" and self._num_published == 0)
        clock = _PhaseClock(self._timeline)
        staged, digests = {"layers": {}}, {"layers": {}}
        for bucket in self._exporter.buckets(params):
            with clock.phase("export"):
                jax.block_until_ready(bucket)
            if is_verified:
                merge(digests, self._digest(bucket))
            with clock.phase("transfer"):
                merge(staged, jax.block_until_ready(self._exporter.transfer(bucket)))
        with clock.phase("transfer"):
            landed = jax.block_until_ready(self._exporter.land(staged))
        stats = SyncStats(
            version=version,
            export_s=clock.seconds["export"],
            transfer_s=clock.seconds["transfer"],
            num_bytes=self._exporter.num_bytes,
            is_verified=is_verified,
        )
        if self._keeps_only_newest:
            self._channel.drain()
        self._channel.put(WeightUpdate(version=version, params=landed, digests=digests if is_verified else None, stats=stats))
        self._num_published += 1
        return stats

    def take(self, *, timeout_s: float | None = None) -> WeightUpdate | None:
        """Waits for the next version in order; None after `timeout_s` seconds without one.

        Raises:
            WeightMismatchError: the checksums differ.
        """
        try:
            return self._checked(self._channel.get(timeout_s=timeout_s))
        except TimeoutError:
            return None

    def take_newest(self) -> WeightUpdate | None:
        """Returns the newest staged version without waiting, or None; older ones are dropped.

        Raises:
            WeightMismatchError: the checksums differ.
        """
        staged = self._channel.drain()
        return self._checked(staged[-1]) if staged else None

    def _checked(self, update: WeightUpdate | None) -> WeightUpdate | None:
        """Compares what arrived with what was sent, leaf by leaf."""
        if update is None or update.digests is None:
            return update
        sent = jax.tree_util.tree_leaves_with_path(jax.device_get(update.digests))
        arrived = jax.tree.leaves(jax.device_get(self._digest(update.params)))
        for (path, expected), found in zip(sent, arrived, strict=True):
            if int(expected) != int(found):
                raise WeightMismatchError(
                    f"weights of version {update.version} arrived damaged: {jax.tree_util.keystr(path)} has {int(found):#010x} on the "
                    f"generator mesh and {int(expected):#010x} on the trainer mesh; report this with the mesh shapes and JAX's version"
                )
        return update


class _PhaseClock:
    """Adds up the seconds of each phase of one publication, on the timeline too."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.seconds = {"export": 0.0, "transfer": 0.0}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        with self._timeline.span("weights", name):
            yield
        self.seconds[name] += time.perf_counter() - started_s
