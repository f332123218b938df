"""Short real runs of the tiny model, for the tests of this folder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamarl_jax import controller
from llamarl_jax.config import Config, EvaluationConfig
from llamarl_jax.controller import RunSummary
from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.executors import trainer as trainer_module
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.metrics.writer import MetricsConfig, read_metrics
from llamarl_jax.models.hugging_face import open_tensors
from llamarl_jax.rewards.api import RewardConfig, RewardTerm
from llamarl_jax.rewards.exact import DigitShare
from llamarl_jax.schedule import ScheduleConfig
from llamarl_jax.train_step import OptimizerConfig, TrainerConfig
from llamarl_jax.types import TrajectoryGroup


def tiny_config(run_dir: Path, **changes: Any) -> Config:
    """A run of a few seconds; `changes` replaces whole component configs or, with a dict, some of their fields."""
    prompts = PromptsConfig(source=DigitPrompts(num_digits=2), template=PlainTemplate())
    base = Config(
        run_dir=str(run_dir),
        model="tiny",
        prompts=prompts,
        evaluation=EvaluationConfig(prompts=None),
        rewards=RewardConfig(terms=(RewardTerm(name="digits", function=DigitShare()),)),
        schedule=ScheduleConfig(num_steps=4, groups_per_step=3, group_size=4, max_staleness=1),
        placement=PlacementConfig(platform="cpu"),
        engine=EngineConfig(num_slots=8, max_prompt_tokens=8, max_new_tokens=6, decode_steps_per_call=2),
        trainer=TrainerConfig(optimizer=OptimizerConfig(learning_rate=3e-3), rows_per_microbatch=4, row_length=32),
        metrics=MetricsConfig(use_live_view=False, write_plot=False),
    )
    replaced = {name: dataclasses.replace(getattr(base, name), **v) if isinstance(v, dict) else v for name, v in changes.items()}
    return dataclasses.replace(base, **replaced)


@dataclass
class Record:
    """What a run left: its summary, metrics rows, final weights by tensor name, and every batch with its step."""

    summary: RunSummary
    rows: list[dict[str, float]]
    weights: dict[str, Any]
    batches: list[tuple[int, list[TrajectoryGroup]]]


def run(config: Config) -> Record:
    """Runs a config and keeps what it trained on."""
    batches: list[tuple[int, list[TrajectoryGroup]]] = []
    original = trainer_module.batch_metrics

    def record(groups: list[TrajectoryGroup], *, step: int) -> dict[str, float]:
        batches.append((step, list(groups)))
        return original(groups, step=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "batch_metrics", record)
        summary = controller.run(config)
    weights = {name: tensor.copy() for name, tensor in open_tensors(summary.model_dir).items()}
    rows = [row for row in read_metrics(Path(config.run_dir)) if "trainer/loss" in row]
    return Record(summary, rows, weights, batches)


def assert_same_weights(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Bit for bit."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.tobytes() == second[name].tobytes(), name
