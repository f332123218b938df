import itertools

import jax
import numpy as np
import pytest

from llamarl_jax.channels import Channel
from llamarl_jax.checkpoint import CheckpointConfig, Checkpointer
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.executors.trainer import NonFiniteGradientError, Trainer
from llamarl_jax.meshes import Meshes, build_mesh
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.schedule import Schedule, ScheduleConfig, SharedSchedule
from llamarl_jax.train_step import OptimizerConfig, TrainerConfig, TrainStep
from llamarl_jax.types import Completion, FinishReason, Trajectory, TrajectoryGroup
from llamarl_jax.weights.channel import WeightChannel, WeightUpdate
from llamarl_jax.weights.export import WeightExporter, WeightsConfig
from tests.data.characters import CharacterTokenizer
from tests.engine.tiny_engine import LISTED, STACKED, random_params

MAX_SKIPPED = 1
NUM_STEPS = 4


@pytest.fixture(scope="module")
def meshes():
    one = jax.devices()[:1]
    return Meshes(build_mesh(one, {"data": 1, "fsdp": 1, "tensor": 1}), build_mesh(one, {"data": 1, "tensor": 1}))


@pytest.fixture(scope="module")
def train_step(meshes):
    options = TrainerConfig(
        rows_per_microbatch=1, row_length=32, max_skipped_steps=MAX_SKIPPED, optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    return TrainStep(STACKED, meshes.trainer, options, num_steps=NUM_STEPS, temperature=1.0)


@pytest.fixture(scope="module")
def exporter(meshes):
    return WeightExporter(STACKED, LISTED, meshes, "float32", WeightsConfig())


class Wiring:
    """A trainer between real neighbours; `advantages` has that of each group's first trajectory, the second one has its opposite."""

    def __init__(self, folder, train_step, exporter, advantages) -> None:
        config = ScheduleConfig(num_steps=NUM_STEPS, groups_per_step=1, group_size=2, max_staleness=NUM_STEPS, mode="in_flight")
        prompts = PromptsConfig(source=DigitPrompts(num_digits=1), template=PlainTemplate())
        stream = PromptStream(prompts, CharacterTokenizer(), max_prompt_tokens=99, seed=0)  # pyright: ignore[reportArgumentType]
        self.schedule, self.cursor = SharedSchedule(Schedule(config)), PromptCursor(stream)
        self.trajectories = Channel[TrajectoryGroup]("trajectories", 9)
        self.staged, self.timeline, self.rows = Channel[WeightUpdate]("weights", 9), Timeline(), {}
        self.checkpointer = Checkpointer(folder, CheckpointConfig())
        params = jax.device_put(jax.device_get(random_params(STACKED)), STACKED.shardings(train_step.mesh))
        self.trainer = Trainer(
            train_step=train_step,
            state=train_step.init_state(params),
            reference=None,
            row_length=32,
            max_new_tokens=8,
            schedule=self.schedule,
            cursor=self.cursor,
            trajectories=self.trajectories,
            weights=WeightChannel(exporter, self.staged, WeightsConfig(), self.timeline, keeps_only_newest=False),
            checkpointer=self.checkpointer,
            host_state={},
            timeline=self.timeline,
            counters=Counters(),
            report=lambda step, metrics: self.rows.update({step: metrics}),
            heartbeat=lambda: None,
        )
        for advantage in advantages:
            self._send(advantage)

    def _send(self, advantage: float) -> None:
        """Does what generator and reward do."""
        index = self.schedule.admit(0).admission_index
        ids = np.arange(10, 16, dtype=np.int32) + 7 * index
        trajectories = tuple(
            Trajectory(
                completion=Completion(
                    sample_index=sample,
                    token_ids=ids + sample,
                    behaviour_logprobs=np.full(6, -5.0, np.float32),
                    weight_versions=np.zeros(6, np.int32),
                    finish_reason=FinishReason.LENGTH,
                ),
                reward=0.0,
                advantage=advantage if sample == 0 else -advantage,
                reward_terms={},
            )
            for sample in range(2)
        )
        group = TrajectoryGroup(prompt=self.cursor.draw(index), admission_index=index, version_class=0, trajectories=trajectories)
        self.schedule.complete(index)
        self.trajectories.put(group)

    def published(self) -> list[np.ndarray]:
        """Returns the first layer's weights of every version that was sent to the generator."""
        return [np.asarray(update.params["layers"][0]["mlp"]["down_proj"]["kernel"]) for update in self.staged.drain()]


def test_too_many_steps_in_a_row_without_a_gradient_end_the_run(tmp_path, train_step, exporter):
    wiring = Wiring(tmp_path, train_step, exporter, [1.0, np.inf, np.nan])
    with (
        wiring.checkpointer,
        pytest.raises(NonFiniteGradientError, match=r"was not finite in 2 steps in a row, up to 2 \(trainer.max_skipped_steps = 1\); the"),
    ):
        wiring.trainer.run()
    start, first, *kept = wiring.published()
    assert not np.array_equal(start, first)
    assert len(kept) == 2
    assert all(np.array_equal(first, weights) for weights in kept)  # "the weights are those before the first of them"
    assert [row["trainer/is_skipped"] for row in wiring.rows.values()] == [0, 1, 1]


def test_a_finite_step_forgives_a_skipped_one(tmp_path, train_step, exporter):
    wiring = Wiring(tmp_path, train_step, exporter, [np.nan, 1.0, np.nan, 1.0])
    with wiring.checkpointer:
        wiring.trainer.run()
    assert [wiring.rows[step]["trainer/is_skipped"] for step in range(NUM_STEPS)] == [1, 0, 1, 0]
    versions = wiring.published()
    assert [np.array_equal(before, after) for before, after in itertools.pairwise(versions)] == [True, False, True, False]
    assert wiring.cursor.state()["outstanding"] == []
    assert wiring.schedule.is_finished
