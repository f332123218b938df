"""What a run has begun and not trained on yet, as one of its rounds begins: what a checkpoint keeps beside the trainer's state.

In `boundary` mode the weights of round k are version k − lag, so a run that is resumed at version s can do again exactly what comes from
round s + lag on. Before that round lie batches that wait for the trainer and completions that are not at their end; both are kept. The
generator writes its part down when the round begins, the trainer adds the trajectories that it has received.

Prompts are kept as positions in their stream, arrays as base64 of little-endian bytes, so that nothing is rounded.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl_jax.engine.slots import RunningCompletion, SlotsSnapshot
from llamarl_jax.schedule import RoundStart
from llamarl_jax.types import Completion, FinishReason, Prompt, Trajectory, TrajectoryGroup

PromptOf = Callable[[int, int], Prompt]
"""(admission index, prompt id) → the prompt."""


@dataclass(frozen=True, kw_only=True)
class UnfinishedGroup:
    """A group of which some completions are still running or waiting; `completions` are those that have ended.

    Attributes:
        round_index: round that admitted it.
    """

    prompt: Prompt
    admission_index: int
    version_class: int
    round_index: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """All of it, as round `schedule.round_index` begins.

    Attributes:
        cursor: position in the prompt stream, as `PromptCursor.undrawn` gives it.
        trajectories: groups that wait for the trainer.
    """

    schedule: RoundStart
    cursor: Mapping[str, Any]
    slots: SlotsSnapshot
    groups: tuple[UnfinishedGroup, ...]
    trajectories: tuple[TrajectoryGroup, ...] = ()

    def at_step(self, step: int) -> Unfinished:
        """Returns what is left of it before batch `step` is taken."""
        return replace(self, schedule=self.schedule.at_step(step))

    def num_missing(self, received: Mapping[int, TrajectoryGroup]) -> int:
        """Counts the groups that wait for the trainer and are not among `received`."""
        return sum(index not in received for index in self._waiting())

    def with_trajectories(self, received: Mapping[int, TrajectoryGroup]) -> Unfinished:
        """Returns it with the groups that wait for the trainer, all of which are among `received`."""
        return replace(self, trajectories=tuple(received[index] for index in self._waiting()))

    def _waiting(self) -> list[int]:
        return sorted([*(index for batch in self.schedule.batches for index in batch), *self.schedule.completed])


def to_plain(unfinished: Unfinished) -> dict[str, Any]:
    """Returns it as what JSON can hold."""
    schedule, slots = unfinished.schedule, unfinished.slots
    return {
        "cursor": dict(unfinished.cursor),
        "round": schedule.round_index,
        "num_dropped": schedule.num_dropped,
        "batches": [list(batch) for batch in schedule.batches],
        "classes": [[index, version] for index, version in schedule.class_of.items()],
        "completed": list(schedule.completed),
        "running": [
            {"slot": r.slot, "ticket": r.ticket, **_tokens_to_plain(r.sample_index, r.token_ids, r.behaviour_logprobs, r.weight_versions)}
            for r in slots.running
        ],
        "queue": [list(waiting) for waiting in slots.queue],
        "free": list(slots.free),
        "groups": [
            {**_group_to_plain(group), "round": group.round_index, "completions": [_completion_to_plain(c) for c in group.completions]}
            for group in unfinished.groups
        ],
        "trajectories": [
            {
                **_group_to_plain(group),
                "num_excluded": group.num_excluded,
                "trajectories": [_trajectory_to_plain(t) for t in group.trajectories],
            }
            for group in unfinished.trajectories
        ],
    }


def from_plain(plain: Mapping[str, Any], prompt_of: PromptOf) -> Unfinished:
    """Returns what `to_plain` has written, `prompt_of` being asked once for each group."""
    return Unfinished(
        schedule=RoundStart(
            round_index=plain["round"],
            num_dropped=plain["num_dropped"],
            batches=tuple(map(tuple, plain["batches"])),
            class_of=dict(plain["classes"]),
            completed=tuple(plain["completed"]),
        ),
        cursor=plain["cursor"],
        slots=SlotsSnapshot(
            running=tuple(RunningCompletion(slot=r["slot"], ticket=r["ticket"], **_tokens_from_plain(r)) for r in plain["running"]),
            queue=tuple((ticket, sample_index) for ticket, sample_index in plain["queue"]),
            free=tuple(plain["free"]),
        ),
        groups=tuple(
            UnfinishedGroup(
                **_group_from_plain(group, prompt_of),
                round_index=group["round"],
                completions=tuple(map(_completion_from_plain, group["completions"])),
            )
            for group in plain["groups"]
        ),
        trajectories=tuple(
            TrajectoryGroup(
                **_group_from_plain(group, prompt_of),
                num_excluded=group["num_excluded"],
                trajectories=tuple(map(_trajectory_from_plain, group["trajectories"])),
            )
            for group in plain["trajectories"]
        ),
    )


def _group_to_plain(group: UnfinishedGroup | TrajectoryGroup) -> dict[str, Any]:
    return {"index": group.admission_index, "class": group.version_class, "prompt": group.prompt.prompt_id}


def _group_from_plain(plain: Mapping[str, Any], prompt_of: PromptOf) -> dict[str, Any]:
    prompt = prompt_of(plain["index"], plain["prompt"])
    return {"prompt": prompt, "admission_index": plain["index"], "version_class": plain["class"]}


def _trajectory_to_plain(trajectory: Trajectory) -> dict[str, Any]:
    numbers = {"reward": trajectory.reward, "advantage": trajectory.advantage, "reward_terms": dict(trajectory.reward_terms)}
    return {"completion": _completion_to_plain(trajectory.completion), **numbers}


def _trajectory_from_plain(plain: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{**plain, "completion": _completion_from_plain(plain["completion"])})


def _completion_to_plain(c: Completion) -> dict[str, Any]:
    tokens = _tokens_to_plain(c.sample_index, c.token_ids, c.behaviour_logprobs, c.weight_versions)
    return {**tokens, "finish_reason": str(c.finish_reason)}


def _completion_from_plain(plain: Mapping[str, Any]) -> Completion:
    return Completion(**_tokens_from_plain(plain), finish_reason=FinishReason(plain["finish_reason"]))


def _tokens_to_plain(sample_index: int, token_ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> dict[str, Any]:
    arrays = {"token_ids": (token_ids, "<i4"), "behaviour_logprobs": (logprobs, "<f4"), "weight_versions": (versions, "<i4")}
    texts = {name: base64.b64encode(array.astype(dtype).tobytes()).decode() for name, (array, dtype) in arrays.items()}
    return {"sample_index": sample_index, **texts}


def _tokens_from_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    dtypes = {"token_ids": np.int32, "behaviour_logprobs": np.float32, "weight_versions": np.int32}
    arrays = {
        name: np.frombuffer(base64.b64decode(plain[name]), np.dtype(dtype).newbyteorder("<")).astype(dtype)
        for name, dtype in dtypes.items()
    }
    return {"sample_index": plain["sample_index"], **arrays}
