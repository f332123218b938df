"""Wires the executors of one run to their channels and lets them go.

    prompts ─► Generator ─ completion groups ─► Reward ─ trajectory groups ─► Trainer
                ▲   (generator mesh)          (host processes)        (trainer mesh) │
                └──────────────── WeightChannel: version k+1 ◄───────────────────────┘

| loop      | consumes               | waits for                        | is unblocked by                     | produces            |
|-----------|------------------------|----------------------------------|-------------------------------------|---------------------|
| Generator | prompts, weights       | admission, weights of its round  | publish, rewards of a round         | completion groups   |
| Reward    | completion groups      | a group, verdicts of the pool    | generator, worker processes         | trajectory groups   |
| Trainer   | trajectory groups      | a legal batch                    | reward                              | steps, weights      |

At a checkpoint in `boundary` mode the trainer also waits for the end of a round.

Each loop is a thread; all share the staleness schedule. The first error in any of them, or a stall that the watchdog notices, closes every
channel and is raised from `run`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from llamarl_jax import config_record, unfinished
from llamarl_jax.channels import Channel, Failure, run_executors
from llamarl_jax.checkpoint import Checkpointer, Restored
from llamarl_jax.config import Config
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.stream import PromptStream
from llamarl_jax.engine.engine import DecodeEngine
from llamarl_jax.engine.memory import plan_memory, resolve_slots
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
from llamarl_jax.types import CompletionGroup, TrajectoryGroup
from llamarl_jax.unfinished import Unfinished
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


@dataclass(frozen=True, kw_only=True)
class _Links:
    """What the executors meet through; all of it ends when `failure` does."""

    failure: Failure
    schedule: SharedSchedule
    cursor: PromptCursor
    completions: Channel[CompletionGroup]
    trajectories: Channel[TrajectoryGroup]
    weights: WeightChannel
    unfinished: Channel[Unfinished] | None  # for checkpoints of a run in rounds
    resumed: Unfinished | None


@dataclass(frozen=True, kw_only=True)
class _Books:
    """What is written down about a run."""

    run_dir: Path
    timeline: Timeline
    counters: Counters
    report: RunReport
    watchdog: Watchdog
    evaluations: list[EvaluationResult]


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
    engine = _build_engine(config, policy, meshes)  # first, because it refuses too many slots before anything is allocated
    with ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(run_dir, config.checkpoint))
        train_step = _build_train_step(config, policy, meshes)
        restored = _restore(config, run_dir, checkpointer, train_step)
        failure = Failure()
        books = _open_books(config, run_dir, restored, failure, stack)
        links = _link(config, policy, meshes, restored, failure, books.timeline)
        pool = stack.enter_context(RewardPool(config.rewards))
        scorer = RewardScorer(config.rewards, policy.tokenizer, pool, partial(advantages, config.advantages))

        trainer = _build_trainer(config, policy, meshes, train_step, restored, checkpointer, links, books)
        reward = _build_reward(scorer, links, books)
        generator = _build_generator(config, policy, engine, scorer, checkpointer, links, books)
        with books.watchdog:
            run_executors({"generator": generator.run, "reward": reward.run, "trainer": trainer.run}, failure)
        books.timeline.save(run_dir)
        model_dir = run_dir / "model"
        export_model(model_dir, trainer.state.params, policy.config, policy.folder)
    return RunSummary(
        run_dir=run_dir,
        model_dir=model_dir,
        plot=plot_run(run_dir) if config.metrics.write_plot else None,
        evaluations=tuple(books.evaluations),
        num_steps=config.schedule.num_steps,
        wall_s=time.perf_counter() - started_s,
    )


def _open_books(config: Config, run_dir: Path, restored: Restored | None, failure: Failure, stack: ExitStack) -> _Books:
    timeline, counters = Timeline(), Counters()
    first_step = restored.step if restored else None
    writer = stack.enter_context(MetricsWriter(run_dir, config.metrics, first_step=first_step, run_config=config_record.to_plain(config)))
    view = stack.enter_context(LiveView(config.schedule.num_steps, is_live=config.metrics.use_live_view))
    config_record.save_config(config, run_dir)
    return _Books(
        run_dir=run_dir,
        timeline=timeline,
        counters=counters,
        report=RunReport(writer, view, timeline, counters),
        watchdog=Watchdog(config.watchdog.timeout_s, failure.latch, run_dir=run_dir),
        evaluations=[],
    )


def _link(config: Config, policy: Policy, meshes: Meshes, restored: Restored | None, failure: Failure, timeline: Timeline) -> _Links:
    start_version = restored.step if restored else 0
    stream = PromptStream(config.prompts, policy.tokenizer, max_prompt_tokens=config.engine.max_prompt_tokens, seed=config.seed)
    plain = restored.host.get("unfinished") if restored else None
    cursor = PromptCursor(stream, plain["cursor"] if plain else restored.host["cursor"] if restored else None)
    resumed = unfinished.from_plain(plain, cursor.hold) if plain else None
    schedule = Schedule(config.schedule, start_version=start_version, round_start=resumed.schedule if resumed else None)
    num_outstanding = (config.schedule.max_staleness + 2) * config.schedule.groups_per_step
    writes_unfinished = config.schedule.mode == "boundary" and config.checkpoint.every_steps > 0
    return _Links(
        failure=failure,
        schedule=failure.register(SharedSchedule(schedule)),
        cursor=cursor,
        completions=failure.register(Channel[CompletionGroup]("completions", capacity=num_outstanding)),
        trajectories=failure.register(Channel[TrajectoryGroup]("trajectories", capacity=2 * num_outstanding)),
        weights=_build_weight_channel(config, policy, meshes, failure, timeline),
        # The generator is at most as many rounds ahead as its weights may lag behind, and one more that the trainer works on.
        unfinished=failure.register(Channel[Unfinished]("unfinished", config.schedule.round_lag + 2)) if writes_unfinished else None,
        resumed=resumed,
    )


def _build_trainer(
    config: Config,
    policy: Policy,
    meshes: Meshes,
    train_step: TrainStep,
    restored: Restored | None,
    checkpointer: Checkpointer,
    links: _Links,
    books: _Books,
) -> Trainer:
    state = restored.state if restored else train_step.init_state(policy.load_params(meshes.trainer))
    return Trainer(
        train_step=train_step,
        state=state,
        reference=_reference(config, policy, meshes, state.params if not restored else None),
        row_length=config.row_length,
        max_new_tokens=config.engine.max_new_tokens,
        schedule=links.schedule,
        cursor=links.cursor,
        trajectories=links.trajectories,
        weights=links.weights,
        checkpointer=checkpointer,
        host_state={"config": config_record.to_plain(config)},
        timeline=books.timeline,
        counters=books.counters,
        report=books.report.step,
        heartbeat=partial(books.watchdog.beat, "trainer"),
        received=links.resumed.trajectories if links.resumed else (),
        unfinished=links.unfinished,
    )


def _build_reward(scorer: RewardScorer, links: _Links, books: _Books) -> Reward:
    return Reward(
        scorer=scorer,
        schedule=links.schedule,
        cursor=links.cursor,
        completions=links.completions,
        trajectories=links.trajectories,
        timeline=books.timeline,
        counters=books.counters,
        heartbeat=partial(books.watchdog.beat, "reward"),
    )


def _build_engine(config: Config, policy: Policy, meshes: Meshes) -> DecodeEngine:
    """Plans the generator's memory and builds its engine, which allocates nothing.

    Raises:
        ValueError: the slots do not fit.
    """
    spec = policy.listed(config.engine.quantization)
    plan = plan_memory(
        spec,
        meshes.generator,
        config.engine,
        num_weight_copies=2 + (config.schedule.round_lag if config.schedule.mode == "boundary" else 0),
        reserved_bytes=_trainer_bytes(policy, meshes) if config.placement.kind == "shared" else 0,
    )
    stop_ids = policy.stop_ids(config.engine.stop_texts)
    engine = resolve_slots(config.engine, plan, most_completions=config.schedule.most_completions)
    return DecodeEngine(spec, meshes.generator, engine, eos_token_ids=stop_ids, seed=config.seed)


def _build_generator(
    config: Config, policy: Policy, engine: DecodeEngine, scorer: RewardScorer, checkpointer: Checkpointer, links: _Links, books: _Books
) -> Generator:
    heartbeat = partial(books.watchdog.beat, "generator")
    return Generator(
        config=config.generator,
        engine=engine,
        max_new_tokens=config.engine.max_new_tokens,
        dispatch_ahead=config.engine.dispatch_ahead,
        schedule=links.schedule,
        cursor=links.cursor,
        weights=links.weights,
        completions=links.completions,
        timeline=books.timeline,
        counters=books.counters,
        heartbeat=heartbeat,
        evaluate=_build_evaluation(config, policy, scorer, heartbeat, books),
        resumed=links.resumed,
        unfinished=links.unfinished,
        is_checkpoint_due=checkpointer.is_due,
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
    exporter = WeightExporter(policy.stacked, policy.listed(config.engine.quantization), meshes, config.engine.dtype, config.weights)
    # In boundary mode every version is taken in order, and at most lag + 1 of them can wait.
    staged = failure.register(Channel[WeightUpdate]("weights", capacity=config.schedule.round_lag + 1))
    return WeightChannel(exporter, staged, config.weights, timeline, keeps_only_newest=config.schedule.mode == "in_flight")


def _build_evaluation(
    config: Config, policy: Policy, scorer: RewardScorer, heartbeat: Callable[[], None], books: _Books
) -> Callable[[SlotScheduler], None] | None:
    """Returns what the generator calls to measure its weights, or None where the config has no held-out problems."""
    if config.evaluation.prompts is None:
        return None
    stream = PromptStream(config.evaluation.prompts, policy.tokenizer, max_prompt_tokens=config.engine.max_prompt_tokens, seed=config.seed)
    prompts = stream.first(config.evaluation.num_prompts)

    def measure(slots: SlotScheduler) -> None:
        with books.timeline.span("generator", "evaluation"):
            result = evaluate(slots, prompts, scorer, max_new_tokens=config.engine.max_new_tokens, heartbeat=heartbeat)
        books.evaluations.append(result)
        books.report.evaluation(slots.version, result.metrics())
        result.save(books.run_dir / "answers" / f"version_{slots.version}.jsonl", config.evaluation.num_samples_kept)

    return measure


def _trainer_bytes(policy: Policy, meshes: Meshes) -> int:
    """Returns what the trainer holds on each of its devices: float32 weights, their gradient, and two moments."""
    shardings = jax.tree.leaves(policy.stacked.shardings(meshes.trainer))
    shapes = jax.tree.leaves(policy.stacked.shapes)
    return 4 * sum(4 * math.prod(s.shard_shape(x.shape)) for x, s in zip(shapes, shardings, strict=True))


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
