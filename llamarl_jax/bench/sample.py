"""One timed run of a batch, by our decoder or by a peer, and the medians of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llamarl_jax.bench.limits import DeviceLimits

TokenIds = list[list[int]]
OURS = "llamarl_jax"
"""Name of our decoder among the runners."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Times of one run.

    Attributes:
        total_s: from the prompts' ids to the last token's id.
        prefill_s: the part until decoding begins.
        decode_steps: steps of the rest; each gives one token to every sequence. A library that samples the first token in its prefill
            has one step less than new tokens.
        step_s: median time of a step, or the mean where single steps cannot be timed.
        token_ids: the new tokens of each prompt.
        disturbance: share of all cores that other processes used meanwhile.
        limits: what the hardware could do at that time, where it was measured.
    """

    total_s: float
    prefill_s: float
    decode_steps: int
    step_s: float
    token_ids: TokenIds = field(repr=False)
    disturbance: float = 0.0
    limits: DeviceLimits | None = None

    @property
    def decode_s(self) -> float:
        """Time of all decode steps, with what happens between them."""
        return self.total_s - self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of the decode part per second of it, over the whole batch."""
        return self.decode_steps * len(self.token_ids) / self.decode_s


class Runner(Protocol):
    """What can decode a batch of prompts greedily, without an end of sequence; `pid` is the process that does it."""

    name: str
    pid: int

    def run(self, prompts: TokenIds, new_tokens: int) -> Sample:
        """Decodes and times the batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """All runs of one runner at one batch.

    Attributes:
        agreement: share of tokens that equal ours.
    """

    runner: str
    batch: int
    samples: tuple[Sample, ...]
    agreement: float

    def median(self, name: str) -> float:
        """Returns the median of an attribute of the samples."""
        return statistics.median(getattr(sample, name) for sample in self.samples)

    @property
    def decode_tokens_per_s(self) -> float:
        """Median of the samples."""
        return self.median("decode_tokens_per_s")


def agreement(ours: TokenIds, theirs: TokenIds) -> float:
    """Returns the share of equal tokens; after a near-tie that is rounded the other way the rest of a sequence differs."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def find_row(rows: Sequence[Row], runner: str, batch: int) -> Row | None:
    """Returns the row of a runner at a batch, if there is one."""
    return next((row for row in rows if (row.runner, row.batch) == (runner, batch)), None)
