"""What a reward is: a plain function from one scored completion to a number, named and weighted in the config.

Reward functions run in worker processes that never import JAX. A function must be picklable: defined at the top level of a module, or a
frozen dataclass with `__call__` where it has options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """One completion as a reward function sees it.

    Attributes:
        completion_text: decoded completion without special tokens.
        reference: gold answer as text, if the data has one.
        metadata: other columns of the row, or the reasoning-gym entry.
        finish_reason: `stop`, `length` or `aborted`.
    """

    prompt_text: str
    completion_text: str
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"


RewardFunction = Callable[[RewardInput], float]


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One named part of the reward."""

    name: str
    """Name of its metric, `reward/term_<name>`."""
    function: RewardFunction
    """Function or callable object."""
    weight: float = 1.0
    """Factor in the weighted sum."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The terms of the reward, and the pool of processes that computes them."""

    terms: tuple[RewardTerm, ...]
    """Terms; the reward is their weighted sum."""
    num_workers: int = 1
    """Worker processes."""
    timeout_s: float = 10.0
    """Seconds for all terms of one completion; then its worker is killed and the completion excluded."""
    max_failure_share: float = 0.01
    """Share of completions that may fail before the run ends with the reasons."""
    min_failures: int = 10
    """Failures below this number never end the run."""
    drops_zero_variance: bool = False
    """Drop groups whose rewards are all equal (they teach nothing) and sample others instead."""

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"rewards.terms has the names {names}; give at least one term, each with a name of its own")
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise ValueError(f"rewards.num_workers = {self.num_workers} must be at least 1 and rewards.timeout_s = {self.timeout_s} above 0")
