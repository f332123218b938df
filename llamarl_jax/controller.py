"""Wires the executors of one run to their channels and lets them go.

    prompts ─► Generator ─ completion groups ─► Reward ─ trajectory groups ─► Trainer
                ▲   (generator mesh)          (host processes)        (trainer mesh) │
                └──────────────── WeightChannel: version k+1 ◄───────────────────────┘

| loop      | consumes               | waits for                        | is unblocked by                     | produces            |
|-----------|------------------------|----------------------------------|-------------------------------------|---------------------|
| Generator | prompts, weights       | admission, weights of its round  | publish, rewards of a round         | completion groups   |
| Reward    | completion groups      | a group, verdicts of the pool    | generator, worker processes         | trajectory groups   |
| Trainer   | trajectory groups      | a legal batch                    | reward                              | steps, weights      |

Each loop is a thread; all share the staleness schedule. The first error in any of them, or a stall that the watchdog notices, closes every
channel and is raised from `run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from llamarl_jax import config_record
from llamarl_jax.channels import Channel, Failure, run_executors
from llamarl_jax.checkpoint import Checkpointer, Restored
from llamarl_jax.config import Config
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.stream import PromptStream
from llamarl_jax.engine.engine import DecodeEngine
from llamarl_jax.engine.slots import SlotScheduler
from llamarl_jax.evaluate import EvaluationResult, evaluate
from llamarl_jax.executors.generator import Generator
from llamarl_jax.executors.reward import Reward
from llamarl_jax.executors.trainer import Trainer
from llamarl_jax.losses.advantages import advantages
from llamarl_jax.meshes import Meshes, build_meshes, configure_platform
from llamarl_jax.metrics.console import LiveView
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.plot import plot_run
from llamarl_jax.metrics.report import RunReport
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.metrics.watchdog import Watchdog
from llamarl_jax.metrics.writer import MetricsWriter
from llamarl_jax.models.hf_export import export_model
from llamarl_jax.models.transformer import Params
from llamarl_jax.policy import Policy, open_policy
from llamarl_jax.rewards.pool import RewardPool
from llamarl_jax.rewards.scoring import RewardScorer
from llamarl_jax.schedule import Schedule, SharedSchedule
from llamarl_jax.train_step import TrainStep
from llamarl_jax.types import CompletionGroup, DroppedGroup, TrajectoryGroup
from llamarl_jax.weights.channel import WeightChannel, WeightUpdate
from llamarl_jax.weights.export import WeightExporter

CHANGEABLE_ON_RESUME = (
    "run_dir",
    "should_resume",
    "schedule.num_steps",
    "placement",
    "weights",
    "evaluation",
    "checkpoint",
    "metrics",
    "watchdog",
)
"""Config fields that a resumed run may have other values of; everything else would change what the checkpoint means."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a finished run leaves behind; evaluations are in the order of their weight versions."""

    run_dir: Path
    model_dir: Path
    plot: Path | None
    evaluations: tuple[EvaluationResult, ...]
    num_steps: int
    wall_s: float


def run(config: Config) -> RunSummary:
    """Trains as the config says and returns when the last step is committed, evaluated and exported.

    Raises:
        Exception: the first error of any executor.
    """
    started_s = time.perf_counter()
    configure_platform(config.placement)
    meshes = build_meshes(config.placement)
    run_dir = Path(config.run_dir)
    policy = open_policy(config.model)
    evaluations: list[EvaluationResult] = []
    with ExitStack() as stack:
        failure, timeline, counters = Failure(), Timeline(), Counters()
        checkpointer = stack.enter_context(Checkpointer(run_dir, config.checkpoint))
        train_step = _build_train_step(config, policy, meshes)
        restored = _restore(config, run_dir, checkpointer, train_step)
        start_version = restored.step if restored else 0
        writer = MetricsWriter(
            run_dir, config.metrics, first_step=start_version if restored else None, run_config=config_record.to_plain(config)
        )
        report = RunReport(stack.enter_context(writer), _view(config, stack), timeline, counters)
        config_record.save_config(config, run_dir)
        watchdog = Watchdog(config.watchdog.timeout_s, failure.latch, run_dir=run_dir)
        pool = stack.enter_context(RewardPool(config.rewards))
        scorer = RewardScorer(config.rewards, policy.tokenizer, pool, partial(advantages, config.advantages))

        schedule = failure.register(SharedSchedule(Schedule(config.schedule, start_version=start_version)))
        cursor = PromptCursor(
            PromptStream(config.prompts, policy.tokenizer, max_prompt_tokens=config.engine.max_prompt_tokens, seed=config.seed),
            _cursor_state(restored),
        )
        num_outstanding = (config.schedule.max_staleness + 2) * config.schedule.groups_per_step
        completions = failure.register(Channel[CompletionGroup]("completions", capacity=num_outstanding))
        trajectories = failure.register(Channel[TrajectoryGroup | DroppedGroup]("trajectories", capacity=2 * num_outstanding))
        weights = _build_weight_channel(config, policy, meshes, failure, timeline)

        state = restored.state if restored else train_step.init_state(policy.load_params(meshes.trainer))
        trainer = Trainer(
            train_step=train_step,
            state=state,
            reference=_reference(config, policy, meshes, state.params if not restored else None),
            row_length=config.row_length,
            max_new_tokens=config.engine.max_new_tokens,
            schedule=schedule,
            cursor=cursor,
            trajectories=trajectories,
            weights=weights,
            checkpointer=checkpointer,
            host_state={"config": config_record.to_plain(config)},
            timeline=timeline,
            counters=counters,
            report=report.step,
            heartbeat=partial(watchdog.beat, "trainer"),
        )
        reward = Reward(
            scorer=scorer,
            schedule=schedule,
            cursor=cursor,
            completions=completions,
            trajectories=trajectories,
            timeline=timeline,
            counters=counters,
            heartbeat=partial(watchdog.beat, "reward"),
        )
        engine = DecodeEngine(
            policy.listed, meshes.generator, config.engine, eos_token_ids=policy.stop_ids(config.engine.stop_texts), seed=config.seed
        )

        def measure(slots: SlotScheduler) -> None:
            assert evaluator is not None
            with timeline.span("generator", "evaluation"):
                evaluations.append(evaluator(slots))
            report.evaluation(slots.version, evaluations[-1].metrics())
            evaluations[-1].save(run_dir / "answers" / f"version_{slots.version}.jsonl", config.evaluation.num_samples_kept)

        evaluator = _build_evaluator(config, policy, scorer, partial(watchdog.beat, "generator"))
        generator = Generator(
            config=config.generator,
            engine=engine,
            max_new_tokens=config.engine.max_new_tokens,
            schedule=schedule,
            cursor=cursor,
            weights=weights,
            completions=completions,
            timeline=timeline,
            counters=counters,
            heartbeat=partial(watchdog.beat, "generator"),
            evaluate=measure if evaluator else None,
        )
        with watchdog:
            run_executors({"generator": generator.run, "reward": reward.run, "trainer": trainer.run}, failure)
        timeline.save(run_dir)
        model_dir = run_dir / "model"
        export_model(model_dir, trainer.state.params, policy.config, policy.folder)
    return RunSummary(
        run_dir=run_dir,
        model_dir=model_dir,
        plot=plot_run(run_dir) if config.metrics.write_plot else None,
        evaluations=tuple(evaluations),
        num_steps=config.schedule.num_steps,
        wall_s=time.perf_counter() - started_s,
    )


def _build_train_step(config: Config, policy: Policy, meshes: Meshes) -> TrainStep:
    return TrainStep(
        policy.stacked,
        meshes.trainer,
        config.trainer,
        num_steps=config.schedule.num_steps,
        temperature=config.generator.temperature,
    )


def _build_weight_channel(config: Config, policy: Policy, meshes: Meshes, failure: Failure, timeline: Timeline) -> WeightChannel:
    exporter = WeightExporter(policy.stacked, policy.listed, meshes, config.engine.dtype, config.weights)
    # In boundary mode every version is taken in order, and at most S + 1 of them can wait.
    staged = failure.register(Channel[WeightUpdate]("weights", capacity=config.schedule.max_staleness + 1))
    return WeightChannel(exporter, staged, config.weights, timeline, keeps_only_newest=config.schedule.mode == "in_flight")


def _build_evaluator(
    config: Config, policy: Policy, scorer: RewardScorer, heartbeat: Callable[[], None]
) -> Callable[[SlotScheduler], EvaluationResult] | None:
    if config.evaluation.prompts is None:
        return None
    stream = PromptStream(config.evaluation.prompts, policy.tokenizer, max_prompt_tokens=config.engine.max_prompt_tokens, seed=config.seed)
    prompts = stream.first(config.evaluation.num_prompts)
    return partial(evaluate, prompts=prompts, scorer=scorer, max_new_tokens=config.engine.max_new_tokens, heartbeat=heartbeat)


def _reference(config: Config, policy: Policy, meshes: Meshes, fresh: Params | None) -> Params | None:
    """Returns the frozen start policy if the KL term needs it; `fresh` are start weights that are on the mesh already."""
    if not config.trainer.kl.coefficient:
        return None
    if fresh is None:
        return policy.load_params(meshes.trainer)
    return jax.jit(partial(jax.tree.map, jnp.copy))(fresh)


def _restore(config: Config, run_dir: Path, checkpointer: Checkpointer, train_step: TrainStep) -> Restored | None:
    """Reads the newest checkpoint if the run is to go on from it, and refuses one that another config has written."""
    if not config.should_resume:
        return None
    restored = checkpointer.restore(train_step.abstract_state())
    changed = [
        difference
        for difference in config_record.differences(restored.host["config"], config_record.to_plain(config))
        if not difference.path.startswith(CHANGEABLE_ON_RESUME)
    ]
    if changed:
        lines = "\n  ".join(map(str, changed))
        raise ValueError(
            f"the checkpoint in {run_dir} was written by another config; undo these changes or start a new run_dir:\n  {lines}"
        )
    return restored


def _cursor_state(restored: Restored | None) -> dict | None:
    return restored.host["cursor"] if restored else None


def _view(config: Config, stack: ExitStack) -> LiveView:
    return stack.enter_context(LiveView(config.schedule.num_steps, is_live=config.metrics.use_live_view))
