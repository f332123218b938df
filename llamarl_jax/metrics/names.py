"""The metric names that the live view and the picture read, in one place.

A name is `<part>/<quantity>` with the unit at its end. Whoever writes one of these imports it from here, so that a renamed metric
cannot leave an empty plot behind. Metrics that nothing else reads need no entry.
"""

from __future__ import annotations

STEP_S = "time/step_s"  # wall seconds of the whole step
REWARD_ALL = "reward/mean_all"  # mean over every scored completion
REWARD_TRAINED = "reward/mean_trained"  # mean over the completions that the step trained on
STALENESS_MEAN = "staleness/mean"  # versions, over the oldest token of each trajectory
STALENESS_MAX = "staleness/max"
TRAINED_TOKENS_PER_S = "throughput/trained_tokens_per_s"
GENERATED_TOKENS_PER_S = "throughput/generated_tokens_per_s"
GRAD_NORM = "trainer/grad_norm"
RATIO_MAX = "ratio/max"
ENTROPY = "policy/entropy"
EVAL_ACCURACY = "eval/accuracy"

EXECUTORS = ("generator", "reward", "trainer", "weights")  # in the order in which a prompt passes them


def staleness_share(staleness: int) -> str:
    """Names the share of trained trajectories whose oldest token had this staleness."""
    return f"staleness/share_{staleness}"


def busy_s(executor: str) -> str:
    """Names the seconds of a step in which the executor worked."""
    return f"time/{executor}_busy_s"


def wait_s(executor: str) -> str:
    """Names the seconds of a step in which the executor waited for another one."""
    return f"time/{executor}_wait_s"


def unaccounted_s(executor: str) -> str:
    """Names the seconds of a step for which the executor recorded nothing."""
    return f"time/{executor}_unaccounted_s"
