"""What travels between executors: prompts, completions, trajectories (host side) and training batches (device side).

Host-side records are frozen and hold NumPy arrays of token ids. Ids come in and ids go out: nothing that was sampled is ever
tokenised again, and the end-of-sequence id is kept as a sampled token. Everything per token carries its own weight version,
because an in-flight weight update lets one completion span several.

This module imports neither JAX nor a tokenizer, so that reward workers can load it in milliseconds.

Dimensions: P prompt tokens, T completion tokens, G completions of a group, B rows of a batch, L tokens of a row.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jax import Array

NO_METADATA: Mapping[str, Any] = {}


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence id was sampled (it is the last token)
    LENGTH = "length"  # the token budget was used up
    DEADLINE = "deadline"  # its time was used up
    ABORTED = "aborted"  # the caller cut it off


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task to answer.

    Attributes:
        prompt_id: position in the prompt stream; with the seed and the sample index it fixes the random numbers of a completion.
        token_ids: int32 [P], exactly as the chat template or the plain template gives them.
        text: the rendered prompt, for logs.
        reference: the gold answer as text, or None where the reward needs none.
        metadata: what else a reward function may need (for instance the reasoning-gym entry); must be picklable.
    """

    prompt_id: int
    token_ids: np.ndarray
    text: str
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: NO_METADATA)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer.

    Attributes:
        sample_index: 0 ≤ index < G inside the group.
        token_ids: int32 [T], end-of-sequence id included when it was sampled.
        behaviour_logprobs: float32 [T], log μ of each token under the distribution that it was really sampled from.
        weight_versions: int32 [T], the weight version that produced each token.
        finish_reason: why it ended.
    """

    sample_index: int
    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    weight_versions: np.ndarray
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.behaviour_logprobs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"per-token arrays of a completion differ in length: {len(self.token_ids)} ids, {len(self.behaviour_logprobs)} "
                f"log-probs, {len(self.weight_versions)} versions; the producer must append to all three together"
            )


@dataclass(frozen=True, kw_only=True)
class CompletionGroup:
    """The G completions of one prompt, and where the group stands in the schedule.

    Attributes:
        admission_index: how many groups were admitted before this one.
        version_class: weight version loaded when the group was admitted: the age of its oldest possible token.
    """

    prompt: Prompt
    admission_index: int
    version_class: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A completion with its reward and advantage; `reward_terms` holds each named term before weighting."""

    completion: Completion
    reward: float
    advantage: float
    reward_terms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroup:
    """A scored group. Samples whose reward failed are absent from `trajectories` and counted in `num_excluded`."""

    prompt: Prompt
    admission_index: int
    version_class: int
    trajectories: tuple[Trajectory, ...]
    num_excluded: int = 0


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """Says that a group was filtered out or could not be scored, and why; its place in the schedule is given back.

    `num_excluded` counts its samples whose reward failed.
    """

    admission_index: int
    reason: str
    num_excluded: int = 0


class TrajectoryBatch(NamedTuple):
    """What one gradient step sees; every field is [B, L] and aligned to the token it describes.

    `segment_ids` is 0 on padding and 1, 2, … for what is packed into a row: trajectories, each seeing itself only. Where completions
    share a prompt, its tokens are a segment of their own and `prefix_ids` names, on each token of the completions, that segment, which it
    sees as well; elsewhere it is 0. `positions` count from the start of the prompt.
    `loss_mask` is 1 on completion tokens. `behaviour_logprobs` and `advantages` are 0 where the mask is 0, `staleness` (versions by
    which a token's weights lag behind those being trained) is −1 there.
    """

    token_ids: Array | np.ndarray  # int32
    positions: Array | np.ndarray  # int32
    segment_ids: Array | np.ndarray  # int32
    prefix_ids: Array | np.ndarray  # int32
    loss_mask: Array | np.ndarray  # float32
    behaviour_logprobs: Array | np.ndarray  # float32
    advantages: Array | np.ndarray  # float32
    staleness: Array | np.ndarray  # int32
