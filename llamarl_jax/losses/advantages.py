"""Advantages of the completions of one prompt from their rewards: how much better each is than its group. Host side, NumPy only.

With rewards r_1 … r_n of a group and their mean m (the completion's own reward included):

    group_mean      A_i = r_i − m                    LlamaRL (arXiv 2505.24034, section 6); GRPO (Shao et al., arXiv 2402.03300)
    leave_one_out   A_i = r_i − mean of the others
                        = n/(n − 1) · (r_i − m)      RLOO (Ahmadian et al., "Back to Basics", arXiv 2402.14740)
    divide_by_std   A_i / (std + epsilon)            GRPO; std with n − 1 in the denominator

The leave-one-out baseline does not depend on the completion that it judges, so it is unbiased; the group mean shrinks every advantage by
(n − 1)/n, which the learning rate absorbs as long as groups are of one size. Dividing by the standard deviation gives very easy and very
hard prompts the same weight as others (Liu et al., "Dr. GRPO", arXiv 2503.20783, count that as a bias).

A group is what arrived: samples whose reward failed are absent, and n is what is left. Rewards are taken relative to the first one before
anything is averaged, so that equal rewards give exactly 0, not a rounding error that a small standard deviation would blow up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How the rewards of a group become advantages."""

    kind: Literal["group_mean", "leave_one_out"] = "group_mean"
    """Baseline: mean of the group with the completion's own reward (as in the paper), or of the other completions."""
    divide_by_std: bool = False
    """Divides by the standard deviation of the group's rewards, as GRPO does."""
    epsilon: float = 1e-6
    """Added to the standard deviation, in units of reward; a spread well below it gives small advantages instead of ±1."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"advantages.epsilon = {self.epsilon} must be a finite number above 0, such as 1e-6")


def advantages(config: AdvantageConfig, rewards: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Returns the float32 advantages of one group's completions, in the order of the rewards.

    A group of one gives 0: there is nothing to compare with (r − m is 0, and without it no other is left), so it teaches nothing.

    Args:
        config: which baseline.
        rewards: float, one per completion of the prompt.

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    values = np.asarray(rewards, np.float64)
    is_bad = ~np.isfinite(values)
    if is_bad.any():
        index = int(np.flatnonzero(is_bad)[0])
        raise ValueError(f"reward {index} of {len(values)} of a group is {values[index]}; a reward function must return a finite number")
    num_samples = len(values)
    if num_samples < 2:
        return np.zeros(num_samples, np.float32)
    relative = values - values[0]
    centred = relative - relative.mean()
    if config.kind == "leave_one_out":
        centred = centred * (num_samples / (num_samples - 1))
    if config.divide_by_std:
        centred = centred / (relative.std(ddof=1) + config.epsilon)
    return centred.astype(np.float32)
