from __future__ import annotations

from typing import Literal

import jax
import numpy as np
import pytest

from llamarl_jax.channels import Channel, ChannelClosed
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.executors.generator import Generator, GeneratorConfig
from llamarl_jax.meshes import Meshes, build_mesh
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.schedule import Schedule, ScheduleConfig, SharedSchedule
from llamarl_jax.types import CompletionGroup
from llamarl_jax.weights.channel import SyncStats, WeightChannel, WeightUpdate
from llamarl_jax.weights.export import WeightExporter, WeightsConfig
from tests.data.characters import CharacterTokenizer
from tests.engine.tiny_engine import LISTED, STACKED, make_engine, place, random_params, unstack

NUM_STEPS, GROUPS, SAMPLES, TOKENS = 3, 2, 3, 5


@pytest.fixture(scope="module")
def engine():
    """Ends a completion at every fifth token on average, so that they do not end all at once."""
    return make_engine(num_slots=4, max_prompt_tokens=8, max_new_tokens=TOKENS, decode_steps_per_call=2, eos_token_ids=tuple(range(58)))


@pytest.fixture(scope="module")
def weights(engine):
    """Weights of each version, on the generator's device."""
    params = unstack(random_params(STACKED))
    return [place(engine, jax.tree.map(lambda x, v=version: x * (1 + 0.1 * v), params)) for version in range(NUM_STEPS + 1)]


class Wiring:
    """A generator between real neighbours. Whenever it reports progress, the test plays reward and trainer, on the same thread."""

    def __init__(
        self,
        engine,
        weights,
        *,
        start_version: int = 0,
        mode: Literal["boundary", "in_flight"] = "boundary",
        dispatch_ahead: int = 1,
        heartbeat=None,
        partial_rollout_rounds: int = 0,
        kv_after_update: Literal["keep", "recompute"] = "keep",
    ) -> None:
        config = ScheduleConfig(
            num_steps=NUM_STEPS,
            groups_per_step=GROUPS,
            group_size=SAMPLES,
            max_staleness=1,
            mode=mode,
            partial_rollout_rounds=partial_rollout_rounds,
        )
        prompts = PromptsConfig(source=DigitPrompts(num_digits=1), template=PlainTemplate(text="{question}"))
        stream = PromptStream(prompts, CharacterTokenizer(), max_prompt_tokens=8, seed=0)  # pyright: ignore[reportArgumentType]
        self.schedule, self.cursor = SharedSchedule(Schedule(config, start_version=start_version)), PromptCursor(stream)
        self.staged, self.completions = Channel[WeightUpdate]("weights", 9), Channel[CompletionGroup]("completions", 9)
        self.counters, self.timeline, self.evaluated = Counters(), Timeline(), []
        self.versions, self.ready, self.batches = weights, {}, []
        one = jax.devices()[:1]
        meshes = Meshes(build_mesh(one, {"data": 1, "fsdp": 1, "tensor": 1}), build_mesh(one, {"data": 1, "tensor": 1}))
        exporter = WeightExporter(STACKED, LISTED, meshes, "float32", WeightsConfig())
        self.generator = Generator(
            config=GeneratorConfig(kv_after_update=kv_after_update),
            engine=engine,
            max_new_tokens=TOKENS,
            dispatch_ahead=dispatch_ahead,
            schedule=self.schedule,
            cursor=self.cursor,
            weights=WeightChannel(exporter, self.staged, WeightsConfig(), self.timeline, keeps_only_newest=mode == "in_flight"),
            completions=self.completions,
            timeline=self.timeline,
            counters=self.counters,
            heartbeat=heartbeat or self.train_what_is_there,
            evaluate=lambda slots: self.evaluated.append((slots.version, slots.is_idle)),
        )

    def publish(self, version: int) -> None:
        stats = SyncStats(version=version, export_s=0.0, transfer_s=0.0, num_bytes=1, is_verified=False)
        self.staged.put(WeightUpdate(version=version, params=self.versions[version], digests=None, stats=stats))

    def train_what_is_there(self) -> None:
        """Completes the groups that have come, and for each batch that is legal then, publishes the next weights."""
        for group in self.completions.drain():
            self.ready[group.admission_index] = group
            self.schedule.complete(group.admission_index)
        while not self.schedule.is_finished and (indices := self.schedule.next_batch()) is not None:
            self.batches.append([self.ready.pop(index) for index in indices])
            self.publish(self.schedule.step)

    def play(self) -> Wiring:
        self.publish(self.schedule.start_version)
        self.generator.run()
        return self


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, r"generator.temperature is 0.0; training needs a temperature above 0"),
        ({"top_k": 5}, r"generator.top_k = 5, top_p = 1.0, min_p = 0.0: training does not reproduce a truncated distribution"),
        ({"top_p": 0.9}, r"generator.top_k = 0, top_p = 0.9, min_p = 0.0: training does not reproduce"),
        ({"min_p": 0.1}, r"generator.top_k = 0, top_p = 1.0, min_p = 0.1: training does not reproduce"),
        ({"completion_deadline_s": 0.0}, r"generator.completion_deadline_s is 0.0; it must be above 0, or None for no limit"),
    ],
)
def test_sampling_that_cannot_be_trained_on(values, message):
    with pytest.raises(ValueError, match=message):
        GeneratorConfig(**values)


@pytest.fixture(scope="module")
def run(engine, weights):
    return Wiring(engine, weights).play()


def test_round_k_has_version_k_minus_s_throughout(run):
    assert [[group.version_class for group in groups] for groups in run.batches] == [[0, 0], [0, 0], [1, 1]]
    for groups in run.batches:
        for group in groups:
            versions = np.concatenate([c.weight_versions for c in group.completions])
            assert set(versions.tolist()) == {group.version_class}


def test_groups_are_whole_and_in_order_of_their_samples(run):
    groups = [group for batch in run.batches for group in batch]
    assert [group.admission_index for group in groups] == list(range(NUM_STEPS * GROUPS))
    assert len({group.prompt.prompt_id for group in groups}) == len(groups)
    for group in groups:
        assert [c.sample_index for c in group.completions] == list(range(SAMPLES))
        assert len({c.token_ids.tobytes() for c in group.completions}) > 1
    num_tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    assert run.counters.take()["generated_tokens"] == num_tokens
    assert len(run.cursor.state()["outstanding"]) == len(groups)  # settled by the trainer, not here


def test_the_first_and_the_last_weights_are_evaluated_with_idle_slots(run):
    assert run.evaluated == [(0, True), (NUM_STEPS, True)]


def test_a_resumed_run_begins_with_its_own_version_and_is_not_evaluated_again(engine, weights):
    wiring = Wiring(engine, weights, start_version=1).play()
    assert [[group.version_class for group in groups] for groups in wiring.batches] == [[1, 1], [1, 1]]
    assert wiring.evaluated == [(NUM_STEPS, True)]


@pytest.mark.parametrize("dispatch_ahead", [0, 1])
def test_partial_rollouts_go_on_at_the_boundary_and_are_counted(engine, weights, dispatch_ahead):
    wiring = Wiring(engine, weights, dispatch_ahead=dispatch_ahead, partial_rollout_rounds=1).play()
    assert [len(groups) for groups in wiring.batches] == [GROUPS] * NUM_STEPS
    crossings, num_tokens_before, num_tokens = 0, 0, 0
    for step, groups in enumerate(wiring.batches):
        for completion in [c for group in groups for c in group.completions]:
            versions = completion.weight_versions
            assert max(0, step - 1) <= versions[0] <= versions[-1] <= step  # C = S: round k has version k
            assert versions.tolist() == sorted(versions.tolist())
            num_tokens += len(versions)
            for version in range(versions[0], versions[-1]):
                crossings += 1
                num_tokens_before += int((versions <= version).sum())
    counters = wiring.counters.take()
    assert crossings > 0
    assert (counters["carried"], counters["carried_tokens"]) == (crossings, num_tokens_before)
    assert counters["generated_tokens"] == num_tokens
    assert wiring.evaluated == [(0, True), (NUM_STEPS, True)]


def test_the_cache_of_partial_rollouts_is_kept_or_computed_again(engine, weights):
    """Both give the same tokens up to the first swap, and other log-probs of what is sampled after it."""
    kept, recomputed = (Wiring(engine, weights, partial_rollout_rounds=1, kv_after_update=kv).play() for kv in ("keep", "recompute"))
    others = {group.admission_index: group for batch in recomputed.batches for group in batch}
    carried = 0
    for group in [group for batch in kept.batches for group in batch if group.version_class == 0]:
        other = others[group.admission_index]
        for one, two in zip(group.completions, other.completions, strict=True):
            length = int((one.weight_versions == 0).sum())
            assert one.behaviour_logprobs[:length].tobytes() == two.behaviour_logprobs[:length].tobytes()
            if length < len(one.token_ids):
                carried += 1
                assert one.behaviour_logprobs[length] != two.behaviour_logprobs[length]
    assert carried > 0
    tokens = [wiring.counters.take()["prefill_tokens"] for wiring in (kept, recomputed)]
    assert tokens[1] > tokens[0]


@pytest.mark.parametrize("dispatch_ahead", [0, 1])
def test_in_flight_weights_are_loaded_amid_completions_and_each_token_says_which(engine, weights, dispatch_ahead):
    wiring = Wiring(engine, weights, mode="in_flight", dispatch_ahead=dispatch_ahead).play()
    all_versions = []
    for step, groups in enumerate(wiring.batches):
        for group in groups:
            for completion in group.completions:
                versions = completion.weight_versions
                assert group.version_class <= versions.min() <= versions.max() <= step
                assert (np.diff(versions) >= 0).all()
                assert step - versions.min() <= 1
                all_versions.append(set(versions.tolist()))
    assert max(map(len, all_versions)) > 1


@pytest.mark.parametrize("dispatch_ahead", [0, 1])
def test_in_flight_too_slots_are_idle_at_the_evaluations(engine, weights, dispatch_ahead):
    """Also where the last rewards come so fast that the schedule is exhausted before the generator looks again."""
    wiring = Wiring(engine, weights, mode="in_flight", dispatch_ahead=dispatch_ahead).play()
    assert wiring.evaluated == [(0, True), (NUM_STEPS, True)]


@pytest.mark.parametrize("place_of_wait", ["channel 'weights'", "channel 'completions'", "schedule"])
def test_a_failure_elsewhere_ends_each_wait(engine, weights, place_of_wait):
    """For the first weights, for room in the queue, and for the rewards of a round."""

    def close_schedule_at_the_end_of_a_round():
        if len(wiring.completions) == GROUPS:
            wiring.schedule.close(error)

    wiring, error = Wiring(engine, weights, heartbeat=close_schedule_at_the_end_of_a_round), KeyError("the trainer died")
    if place_of_wait != "schedule":
        {"channel 'weights'": wiring.staged, "channel 'completions'": wiring.completions}[place_of_wait].close(error)
    if place_of_wait != "channel 'weights'":
        wiring.publish(0)
    with pytest.raises(ChannelClosed, match=f"{place_of_wait} was closed by KeyError: 'the trainer died'"):
        wiring.generator.run()
