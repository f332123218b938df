"""What a run has begun and not trained on yet, as one of its rounds begins: what a checkpoint keeps beside the trainer's state.

In `boundary` mode the weights of round k are version k − lag, so a run that is resumed at version s can do again exactly what comes from
round s + lag on. What was begun before that round was begun with weights that are gone: batches that wait for the trainer, and completions
that are not at their end. Both are kept. The generator writes its part down when the round begins, the trainer adds the trajectories that
it has received.

Prompts are kept as positions in their stream, arrays as base64 of little-endian bytes, so that nothing is rounded.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl_jax.schedule import RoundStart
from llamarl_jax.types import Completion, CompletionGroup, FinishReason, Prompt, Trajectory, TrajectoryGroup

PromptOf = Callable[[int, int], Prompt]
"""(admission index, prompt id) → the prompt."""

ARRAYS = {"token_ids": np.int32, "behaviour_logprobs": np.float32, "weight_versions": np.int32}
"""The per-token arrays of a completion."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """All of it, as round `schedule.round_index` begins.

    Attributes:
        cursor: position in the prompt stream, as `PromptCursor.undrawn` gives it.
        groups: groups that are being sampled, with those of their completions that have ended.
        running: what `SlotScheduler.unfinished` says of the others.
        trajectories: groups that wait for the trainer.
    """

    schedule: RoundStart
    cursor: Mapping[str, Any]
    groups: tuple[CompletionGroup, ...]
    running: tuple[tuple[int, Completion], ...]
    trajectories: tuple[TrajectoryGroup, ...] = ()

    def at_step(self, step: int) -> Unfinished:
        """Returns what is left of it before batch `step` is taken."""
        return replace(self, schedule=self.schedule.at_step(step))

    def awaiting_trainer(self) -> list[int]:
        """Returns the admission indices of the groups that have their rewards."""
        return sorted([*(index for batch in self.schedule.batches for index in batch), *self.schedule.completed])


def to_plain(unfinished: Unfinished) -> dict[str, Any]:
    """Returns it as what JSON can hold."""
    schedule = unfinished.schedule
    return {
        "cursor": dict(unfinished.cursor),
        "schedule": {
            "round_index": schedule.round_index,
            "num_dropped": schedule.num_dropped,
            "batches": schedule.batches,
            "class_of": list(schedule.class_of.items()),
            "completed": schedule.completed,
        },
        "groups": [_group_to_plain(g, completions=[*map(_completion_to_plain, g.completions)]) for g in unfinished.groups],
        "running": [[ticket, _completion_to_plain(c)] for ticket, c in unfinished.running],
        "trajectories": [
            _group_to_plain(
                g,
                num_excluded=g.num_excluded,
                completions=[_completion_to_plain(t.completion) for t in g.trajectories],
                rewards=[[t.reward, t.advantage, dict(t.reward_terms)] for t in g.trajectories],
            )
            for g in unfinished.trajectories
        ],
    }


def from_plain(plain: Mapping[str, Any], prompt_of: PromptOf) -> Unfinished:
    """Returns what `to_plain` has written, `prompt_of` being asked once for each group."""
    schedule = plain["schedule"]
    return Unfinished(
        cursor=plain["cursor"],
        schedule=RoundStart(
            round_index=schedule["round_index"],
            num_dropped=schedule["num_dropped"],
            batches=tuple(map(tuple, schedule["batches"])),
            class_of=dict(schedule["class_of"]),
            completed=tuple(schedule["completed"]),
        ),
        groups=tuple(
            CompletionGroup(**_group_from_plain(g, prompt_of), completions=tuple(map(_completion_from_plain, g["completions"])))
            for g in plain["groups"]
        ),
        running=tuple((ticket, _completion_from_plain(c)) for ticket, c in plain["running"]),
        trajectories=tuple(
            TrajectoryGroup(**_group_from_plain(g, prompt_of), num_excluded=g["num_excluded"], trajectories=_trajectories_from_plain(g))
            for g in plain["trajectories"]
        ),
    )


def _group_to_plain(group: CompletionGroup | TrajectoryGroup, **members: Any) -> dict[str, Any]:
    return {"index": group.admission_index, "class": group.version_class, "prompt": group.prompt.prompt_id, **members}


def _group_from_plain(plain: Mapping[str, Any], prompt_of: PromptOf) -> dict[str, Any]:
    prompt = prompt_of(plain["index"], plain["prompt"])
    return {"prompt": prompt, "admission_index": plain["index"], "version_class": plain["class"]}


def _trajectories_from_plain(plain: Mapping[str, Any]) -> tuple[Trajectory, ...]:
    completions = map(_completion_from_plain, plain["completions"])
    return tuple(
        Trajectory(completion=completion, reward=reward, advantage=advantage, reward_terms=terms)
        for completion, (reward, advantage, terms) in zip(completions, plain["rewards"], strict=True)
    )


def _completion_to_plain(completion: Completion) -> dict[str, Any]:
    arrays = {name: getattr(completion, name).astype(np.dtype(dtype).newbyteorder("<")) for name, dtype in ARRAYS.items()}
    texts = {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}
    return {"sample_index": completion.sample_index, "finish_reason": str(completion.finish_reason), **texts}


def _completion_from_plain(plain: Mapping[str, Any]) -> Completion:
    arrays = {
        name: np.frombuffer(base64.b64decode(plain[name]), np.dtype(dtype).newbyteorder("<")).astype(dtype)
        for name, dtype in ARRAYS.items()
    }
    return Completion(sample_index=plain["sample_index"], finish_reason=FinishReason(plain["finish_reason"]), **arrays)
