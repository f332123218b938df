"""What a reward is: a plain function from one scored completion to a number, named and weighted in the config.

Reward functions run in worker processes that never import JAX of their own accord. A function is defined at the top level of a module, or
is a frozen dataclass with `__call__` where it has options. Functions of importable modules travel by name; those of a script, a notebook
or a config file travel by value (cloudpickle). A callable object may have a method `warm_up()`: it runs once when a worker starts, outside
the time limit of an answer, and is the place for slow imports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """One completion as a reward function sees it.

    Attributes:
        prompt_text: rendered prompt.
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
    start_timeout_s: float = 120.0
    """Seconds for a worker to start and import what the terms need; then the run ends."""
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
        for term in self.terms:
            if not callable(term.function):
                raise ValueError(f"reward term {term.name!r} has the function {term.function!r}, which cannot be called; give a function")
            if not math.isfinite(term.weight):
                raise ValueError(f"reward term {term.name!r} has the weight {term.weight}; choose a finite number")
        if self.num_workers < 1:
            raise ValueError(f"rewards.num_workers = {self.num_workers} must be at least 1")
        if not (self.timeout_s > 0 and self.start_timeout_s > 0):
            raise ValueError(f"rewards.timeout_s = {self.timeout_s} and rewards.start_timeout_s = {self.start_timeout_s} must be above 0")
        if not 0 <= self.max_failure_share <= 1:
            raise ValueError(f"rewards.max_failure_share = {self.max_failure_share} must lie between 0 and 1 (0.01 is one in a hundred)")
