"""Whole runs whose rounds end before all of their completions do: bound, reproducibility, resume, metrics."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl_jax.checkpoint import CheckpointConfig
from llamarl_jax.config import Config
from llamarl_jax.executors.generator import GeneratorConfig
from llamarl_jax.executors.reward import Reward
from llamarl_jax.executors.trainer import Trainer
from tests.integration.tiny_run import Record, assert_same_weights, run, tiny_config

NUM_STEPS, GROUPS, SAMPLES = 7, 3, 4


def config_of(folder: Path, staleness: int, carried: int, **changes: Any) -> Config:
    """Seven slots for rounds of twelve completions of up to 6 tokens, so that most rounds end amid some of them."""
    schedule = {"num_steps": NUM_STEPS, "max_staleness": staleness, "partial_rollout_rounds": carried, "max_dropped_batches": 100}
    engine = {"num_slots": 7, "decode_steps_per_call": 1, **changes.pop("engine", {})}
    return tiny_config(folder, schedule=schedule, engine=engine, **changes)


def assert_same_batches(first: list, second: list) -> None:
    """Bit for bit: who is in which batch, and every per-token array."""
    assert [step for step, _ in first] == [step for step, _ in second]
    for (_, groups), (_, others) in zip(first, second, strict=True):
        assert [(g.admission_index, g.prompt.prompt_id) for g in groups] == [(g.admission_index, g.prompt.prompt_id) for g in others]
        for group, other in zip(groups, others, strict=True):
            for one, two in zip(group.trajectories, other.trajectories, strict=True):
                assert (one.reward, one.advantage, one.completion.finish_reason) == (
                    two.reward,
                    two.advantage,
                    two.completion.finish_reason,
                )
                for name in ("token_ids", "behaviour_logprobs", "weight_versions"):
                    assert getattr(one.completion, name).tobytes() == getattr(two.completion, name).tobytes()


def delayed(patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    """Makes each call of a method take some milliseconds more."""
    original: Callable[..., Any] = getattr(owner, method)

    def slow(*args, **kwargs):
        threading.Event().wait(0.02)
        return original(*args, **kwargs)

    patch.setattr(owner, method, slow)


def run_until_step(config: Config, last: int) -> None:
    """Runs and pulls the plug before batch `last` is taken."""
    original = Trainer._wait_for_batch

    def stop(self):
        if self._schedule.step == last:
            raise KeyError("pulled the plug")
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_wait_for_batch", stop)
        with pytest.raises(KeyError, match="pulled the plug"):
            run(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Record:
    return run(config_of(tmp_path_factory.mktemp("whole"), 2, 1))


def test_completions_go_on_under_the_next_weights_and_the_bound_holds(whole):
    num_mixed = 0
    for step, groups in whole.batches:
        assert len(groups) == GROUPS
        for group in groups:
            assert [t.completion.sample_index for t in group.trajectories] == list(range(SAMPLES))
            for trajectory in group.trajectories:
                versions = trajectory.completion.weight_versions
                assert group.version_class <= versions[0]
                assert (np.diff(versions) >= 0).all()
                assert max(0, step - 2) <= versions[0] <= versions[-1] <= max(0, step - 1)
                num_mixed += len(set(versions.tolist())) > 1
    assert num_mixed > 5
    indices = [group.admission_index for _, groups in whole.batches for group in groups]
    assert sorted(indices) == list(range(NUM_STEPS * GROUPS))  # nothing thrown away, nothing twice


def test_what_is_carried_is_counted_and_no_token_twice(whole):
    assert sum(row["generator/num_carried"] for row in whole.rows) >= 5
    assert sum(row["generator/carried_tokens"] for row in whole.rows) >= sum(row["generator/num_carried"] for row in whole.rows)
    num_tokens = sum(len(t.completion.token_ids) for _, groups in whole.batches for g in groups for t in g.trajectories)
    assert sum(row["generator/tokens"] for row in whole.rows) == num_tokens
    assert all(0 < row["generator/slot_utilisation"] <= 1 for row in whole.rows if "generator/slot_utilisation" in row)


@pytest.mark.parametrize(("owner", "method"), [(Reward, "_hand_on"), (Trainer, "_train")])
def test_a_run_does_not_depend_on_how_fast_rewards_or_trainer_are(tmp_path, whole, monkeypatch, owner, method):
    delayed(monkeypatch, owner, method)
    slow = run(config_of(tmp_path, 2, 1))
    assert_same_batches(slow.batches, whole.batches)
    assert_same_weights(slow.weights, whole.weights)


@pytest.mark.parametrize(
    ("staleness", "carried", "changes"),
    [
        (2, 0, {}),
        (1, 1, {"rewards": {"drops_zero_variance": True}}),
        (2, 1, {}),
        (2, 1, {"generator": GeneratorConfig(kv_after_update="recompute")}),
        (3, 1, {"engine": {"dispatch_ahead": 1, "prefill_chunk_tokens": 16}}),
        (2, 1, {"engine": {"slots_per_prompt": 2}}),
        (1, 1, {"engine": {"slots_per_prompt": 4}, "generator": GeneratorConfig(kv_after_update="recompute")}),
    ],
    ids=["whole rounds", "C = S, drops", "kv kept", "kv recomputed", "lag 2, calls ahead", "shared prompts", "shared prompts recomputed"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, staleness, carried, changes):
    """With partial rollouts both runs must write checkpoints, as KV caches are computed again there."""
    cut = config_of(tmp_path / "cut", staleness, carried, checkpoint=CheckpointConfig(every_steps=3), **changes)
    whole = run(dataclasses.replace(cut, run_dir=str(tmp_path / "whole"), checkpoint=cut.checkpoint if carried else CheckpointConfig()))
    run_until_step(cut, 5)
    resumed = run(dataclasses.replace(cut, should_resume=True))
    assert_same_batches(resumed.batches, whole.batches[3:])
    assert_same_weights(resumed.weights, whole.weights)
    if carried:
        assert any(row["generator/num_carried"] for row in whole.rows)


def test_sharing_prompts_changes_no_token_that_the_first_weights_sample(tmp_path):
    alone, shared = (run(config_of(tmp_path / str(n), 1, 0, engine={"slots_per_prompt": n})) for n in (1, 4))
    for (_, groups), (_, others) in zip(alone.batches[:2], shared.batches[:2], strict=True):
        for group, other in zip(groups, others, strict=True):
            for one, two in zip(group.trajectories, other.trajectories, strict=True):
                assert one.completion.token_ids.tolist() == two.completion.token_ids.tolist()
                np.testing.assert_allclose(one.completion.behaviour_logprobs, two.completion.behaviour_logprobs, atol=1e-5)
    assert alone.rows[0]["trainer/loss"] == pytest.approx(shared.rows[0]["trainer/loss"], abs=1e-5)
    assert len(shared.batches) == NUM_STEPS


def test_the_last_checkpoint_holds_nothing_unfinished_and_can_be_gone_on_from(tmp_path):
    config = config_of(tmp_path, 2, 1, checkpoint=CheckpointConfig(every_steps=NUM_STEPS))
    model_dir = run(config).summary.model_dir
    shutil.rmtree(model_dir)  # a run does not write over it
    nothing_left = run(dataclasses.replace(config, should_resume=True))
    assert nothing_left.batches == []
    shutil.rmtree(model_dir)
    longer = dataclasses.replace(config.schedule, num_steps=NUM_STEPS + 2)
    more = run(dataclasses.replace(config, should_resume=True, schedule=longer))
    assert [step for step, _ in more.batches] == [NUM_STEPS, NUM_STEPS + 1]
    indices = [group.admission_index for _, groups in more.batches for group in groups]
    assert sorted(indices) == list(range(NUM_STEPS * GROUPS, (NUM_STEPS + 2) * GROUPS))
