"""Metrics of one training batch, computed on the host from what was really trained on (never from padded arrays).

All means are over trajectories, tokens or groups of the whole batch at once, so none is a mean of means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from llamarl_jax.metrics import names
from llamarl_jax.types import FinishReason, Trajectory, TrajectoryGroup


def batch_metrics(groups: Sequence[TrajectoryGroup], *, step: int) -> dict[str, float]:
    """Returns rewards, staleness (of each trajectory's oldest token), lengths and truncation of a batch.

    Args:
        groups: the batch of optimizer step `step`, which trains weight version `step`.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    staleness = np.array([oldest_staleness(t, step) for t in trajectories])
    lengths = np.array([len(t.completion.token_ids) for t in trajectories])
    is_truncated = [t.completion.finish_reason is not FinishReason.STOP for t in trajectories]
    is_flat = [len({t.reward for t in group.trajectories}) == 1 for group in groups]
    metrics = {
        names.REWARD_TRAINED: float(np.mean([t.reward for t in trajectories])),
        "reward/std_trained": float(np.std([t.reward for t in trajectories])),
        "reward/zero_variance_share": float(np.mean(is_flat)),
        names.STALENESS_MEAN: float(staleness.mean()),
        names.STALENESS_MAX: float(staleness.max()),
        "completion/tokens_mean": float(lengths.mean()),
        "completion/tokens_max": float(lengths.max()),
        "completion/truncation_rate": float(np.mean(is_truncated)),
        "completion/num_trained": float(len(trajectories)),
        "completion/mixed_version_share": float(np.mean([_has_several_versions(t) for t in trajectories])),
    }
    for value, count in zip(*np.unique(staleness, return_counts=True), strict=True):
        metrics[names.staleness_share(int(value))] = count / len(trajectories)
    for name, values in _reward_terms(trajectories).items():
        metrics[f"reward/term_{name}"] = float(np.mean(values))
    return metrics


def oldest_staleness(trajectory: Trajectory, step: int) -> int:
    """Returns step − version of the oldest token; the age of a completion is that of its oldest token, not of its last."""
    return step - int(trajectory.completion.weight_versions.min())


def _has_several_versions(trajectory: Trajectory) -> bool:
    versions = trajectory.completion.weight_versions
    return bool(versions.min() != versions.max())


def _reward_terms(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    terms: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward_terms.items():
            terms[name].append(value)
    return terms
