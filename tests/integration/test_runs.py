"""Properties of whole runs: staleness, reproducibility, equality with a plain loop, resume, and how runs end."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from llamarl_jax.checkpoint import CheckpointConfig, Checkpointer, CheckpointMissingError
from llamarl_jax.data.packing import pack
from llamarl_jax.data.stream import PromptStream
from llamarl_jax.engine.engine import DecodeEngine
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.executors.generator import Generator
from llamarl_jax.executors.reward import Reward
from llamarl_jax.executors.trainer import Trainer
from llamarl_jax.losses.advantages import advantages
from llamarl_jax.losses.normalisation import denominator
from llamarl_jax.meshes import build_meshes
from llamarl_jax.models.hf_export import export_model
from llamarl_jax.models.hugging_face import open_tensors
from llamarl_jax.policy import Policy, open_policy
from llamarl_jax.quantization.fp8 import QuantizationConfig
from llamarl_jax.rewards.api import RewardInput, RewardTerm
from llamarl_jax.rewards.exact import DigitShare
from llamarl_jax.rewards.pool import RewardFailureError
from llamarl_jax.train_step import TrainStep
from llamarl_jax.types import FinishReason, Trajectory, TrajectoryBatch, TrajectoryGroup
from llamarl_jax.weights.export import WeightExporter
from tests.integration.tiny_run import assert_same_weights, run, tiny_config


@pytest.mark.parametrize("mode", ["boundary", "in_flight"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_no_token_is_older_than_the_bound_and_the_histogram_says_so(tmp_path, mode, max_staleness):
    config = tiny_config(tmp_path, schedule={"num_steps": 6, "max_staleness": max_staleness, "mode": mode})
    record = run(config)
    assert [step for step, _ in record.batches] == list(range(6))
    for (step, groups), row in zip(record.batches, record.rows, strict=True):
        trajectories = [t for group in groups for t in group.trajectories]
        assert len(trajectories) == 12
        versions = np.concatenate([t.completion.weight_versions for t in trajectories])
        assert (step - versions).max() <= max_staleness
        assert versions.max() <= step
        oldest = Counter(step - int(t.completion.weight_versions.min()) for t in trajectories)
        shares = {int(name.removeprefix("staleness/share_")): v for name, v in row.items() if name.startswith("staleness/share_")}
        assert shares == pytest.approx({age: count / 12 for age, count in oldest.items()})
        assert row["staleness/max"] == max(oldest)
        if mode == "boundary":
            assert set(versions.tolist()) == {max(0, step - max_staleness)}
            assert row["completion/mixed_version_share"] == 0
    indices = [group.admission_index for _, groups in record.batches for group in groups]
    assert sorted(indices) == list(range(18))  # nothing thrown away, nothing twice


def test_the_same_config_gives_the_same_run_bit_for_bit(tmp_path):
    first, second = (run(tiny_config(tmp_path / name)) for name in ("a", "b"))
    assert_same_weights(first.weights, second.weights)
    assert [row["trainer/grad_norm"] for row in first.rows] == [row["trainer/grad_norm"] for row in second.rows]
    other = run(tiny_config(tmp_path / "c", seed=1))
    assert any(other.weights[name].tobytes() != tensor.tobytes() for name, tensor in first.weights.items())


def test_staleness_zero_equals_a_plain_synchronous_loop_bit_for_bit(tmp_path):
    config = tiny_config(tmp_path / "run", schedule={"max_staleness": 0})
    asynchronous = run(config)
    _plain_loop(config, tmp_path / "plain")
    assert_same_weights(asynchronous.weights, open_tensors(tmp_path / "plain"))


def _plain_loop(config, folder):
    """Generate, score, train, one after the other: no threads, no channels, no schedule."""
    meshes, policy = build_meshes(config.placement), open_policy(config.model)
    stream = PromptStream(config.prompts, policy.tokenizer, max_prompt_tokens=config.engine.max_prompt_tokens, seed=config.seed)
    step_functions = TrainStep(policy.stacked, meshes.trainer, config.trainer, num_steps=config.schedule.num_steps, temperature=1.0)
    state = step_functions.init_state(policy.load_params(meshes.trainer))
    exporter = WeightExporter(policy.stacked, policy.listed(config.engine.quantization), meshes, config.engine.dtype, config.weights)
    engine = DecodeEngine(
        policy.listed(config.engine.quantization),
        meshes.generator,
        config.engine,
        eos_token_ids=policy.config.eos_token_ids,
        seed=config.seed,
    )
    slots, position, reward = SlotScheduler(engine, exporter.send(state.params), 0), 0, DigitShare()
    for step in range(config.schedule.num_steps):
        prompts = []
        for index in range(config.schedule.groups_per_step):
            prompt, position = stream.next(position)
            prompts.append(prompt)
            samples = range(config.schedule.group_size)
            slots.submit(
                [
                    CompletionRequest(ticket=4 * index + i, prompt=prompt, sample_index=i, sampling=SamplingConfig(), max_new_tokens=6)
                    for i in samples
                ]
            )
        finished = {}
        while not slots.is_idle:
            finished.update(slots.step())
        groups = []
        for index, prompt in enumerate(prompts):
            completions = [finished[4 * index + i] for i in range(4)]
            texts = [policy.tokenizer.decode(c.token_ids) for c in completions]
            rewards = np.array([reward(RewardInput(prompt_text=prompt.text, completion_text=t, reference=prompt.reference)) for t in texts])
            trajectories = tuple(
                Trajectory(completion=c, reward=r, advantage=float(a), reward_terms={})
                for c, r, a in zip(completions, rewards, advantages(config.advantages, rewards), strict=True)
            )
            groups.append(TrajectoryGroup(prompt=prompt, admission_index=index, version_class=step, trajectories=trajectories))
        batch, _ = pack(groups, row_length=config.row_length, num_rows_multiple=4, step=step)
        total = denominator(batch, config.trainer.normalisation, max_tokens=6)
        sums = None
        for first in range(0, len(batch.token_ids), 4):
            rows = step_functions.place(TrajectoryBatch(*(x[first : first + 4] for x in batch)))
            sums = step_functions.accumulate(state.params, sums, rows, total, None)
        assert sums is not None
        state, _ = step_functions.update(state, sums)
        slots.swap_weights(exporter.send(state.params), step + 1)
    export_model(folder, state.params, policy.config, None)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_trainer_and_decoder_agree_after_several_steps_and_syncs(tmp_path, temperature):
    """At staleness 0 any difference between π and μ is numerical; it stays so after three optimizer steps."""
    schedule = {"max_staleness": 0, "num_steps": 5, "groups_per_step": 6, "group_size": 8}
    config = tiny_config(tmp_path, schedule=schedule, generator={"temperature": temperature}, weights={"verify": "always"})
    rows = run(config).rows
    assert len(rows) == 5
    for row in rows:
        assert row["mismatch/equal_version_logprob_abs_mean"] < 1e-5
        assert row["mismatch/logprob_abs_max"] < 1e-5
        assert row["ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert row["sync/is_verified"] == 1
    assert any(row["trainer/grad_norm"] > 0 for row in rows[:-1])  # the last rows really are of other weights


@pytest.fixture(scope="module")
def on_one_device_each(tmp_path_factory):
    return run(tiny_config(tmp_path_factory.mktemp("runs"), schedule={"max_staleness": 0, "num_steps": 2}))


@pytest.mark.parametrize(
    "placement",
    [
        {"kind": "shared"},
        {"trainer_data": 2, "trainer_fsdp": 2, "generator_data": 2, "generator_tensor": 2},
        {"trainer_fsdp": 2, "trainer_tensor": 2, "generator_data": 4},
        {"kind": "shared", "trainer_fsdp": 4, "generator_data": 2, "generator_tensor": 2},
    ],
    ids=["one shared device", "2x2x1 + 2x2", "1x2x2 + 4x1", "4 shared devices"],
)
def test_every_placement_learns_the_same(tmp_path, on_one_device_each, placement):
    """Other meshes change rounding only: the first steps' rewards and gradients agree."""
    other = run(tiny_config(tmp_path, schedule={"max_staleness": 0, "num_steps": 2}, placement=placement))
    assert other.rows[0]["reward/mean_trained"] == on_one_device_each.rows[0]["reward/mean_trained"]
    assert other.rows[0]["trainer/grad_norm"] == pytest.approx(on_one_device_each.rows[0]["trainer/grad_norm"], rel=1e-4)
    assert other.rows[1]["mismatch/logprob_abs_max"] < 1e-5


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    schedule = {"max_staleness": 0, "num_steps": 6}
    whole = run(tiny_config(tmp_path / "whole", schedule=schedule))
    # The schedule's length would change the learning rate's end, so the first part is the same run cut off by an error at step 4.
    config = tiny_config(tmp_path / "cut", schedule=schedule, checkpoint=CheckpointConfig(every_steps=2))
    with pytest.MonkeyPatch.context() as patch:
        original = Trainer._wait_for_batch

        def stop_at_step_4(self):
            if len(self.stops) == 4:
                raise KeyError("pulled the plug")
            self.stops.append(None)
            return original(self)

        patch.setattr(Trainer, "stops", [], raising=False)
        patch.setattr(Trainer, "_wait_for_batch", stop_at_step_4)
        with pytest.raises(KeyError, match="pulled the plug"):
            run(config)
    resumed = run(dataclasses.replace(config, should_resume=True))
    assert [step for step, _ in resumed.batches] == [4, 5]
    assert_same_weights(resumed.weights, whole.weights)
    prompts = [[g.prompt.prompt_id for g in groups] for _, groups in resumed.batches]
    assert prompts == [[g.prompt.prompt_id for g in groups] for _, groups in whole.batches[4:]]
    with pytest.raises(ValueError, match=r"was written by another config.*\n.*seed: 0 -> 3"):
        run(dataclasses.replace(config, should_resume=True, seed=3))
    with pytest.raises(FileExistsError, match="already holds the metrics of a run"):
        run(config)


def test_resuming_from_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointMissingError, match="no checkpoint in"):
        run(dataclasses.replace(tiny_config(tmp_path), should_resume=True))


def test_checkpoint_config_and_round_trip(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint.every_steps = -1"):
        CheckpointConfig(every_steps=-1)
    with Checkpointer(tmp_path, CheckpointConfig(every_steps=2, num_kept=1)) as checkpointer:
        assert [checkpointer.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
        for step in (2, 4):
            checkpointer.save(step, {"x": jax.numpy.arange(3) * step}, {"cursor": {"next_position": step, "outstanding": [1]}})
        restored = checkpointer.restore(
            {"x": jax.ShapeDtypeStruct((3,), jax.numpy.int32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1]))}
        )
        assert restored.step == 4
        assert restored.state["x"].tolist() == [0, 4, 8]
        assert restored.host == {"cursor": {"next_position": 4, "outstanding": [1]}}


def test_dropped_groups_are_replaced_and_the_bound_still_holds(tmp_path):
    for mode in ("boundary", "in_flight"):
        config = tiny_config(
            tmp_path / mode, schedule={"num_steps": 5, "mode": mode, "max_staleness": 2}, rewards={"drops_zero_variance": True}
        )
        record = run(config)
        assert sum(row["reward/num_dropped_groups"] for row in record.rows) > 0
        for step, groups in record.batches:
            assert len(groups) == 3
            for group in groups:
                assert len({t.reward for t in group.trajectories}) > 1
                assert all(step - t.completion.weight_versions.min() <= 2 for t in group.trajectories)


def always_one(_sample: RewardInput) -> float:
    return 1.0


def always_broken(_sample: RewardInput) -> float:
    raise KeyError("no such column")


def test_all_groups_dropped_ends_with_a_clear_error(tmp_path):
    rewards = dataclasses.replace(
        tiny_config(tmp_path).rewards, terms=(RewardTerm(name="one", function=always_one),), drops_zero_variance=True
    )
    config = tiny_config(tmp_path, rewards=rewards, schedule={"max_dropped_batches": 2})
    with pytest.raises(RuntimeError, match="groups were dropped while batch 0 was filled"):
        run(config)


def test_a_broken_reward_ends_the_run_with_its_reason(tmp_path):
    rewards = dataclasses.replace(tiny_config(tmp_path).rewards, terms=(RewardTerm(name="broken", function=always_broken),))
    with pytest.raises(RewardFailureError, match=r"12 of 12 completions could not be scored .*no such column"):
        run(tiny_config(tmp_path, rewards=rewards, schedule={"groups_per_step": 3}))


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Generator, "_decode"), (Reward, "_hand_on"), (Trainer, "_train"), (Trainer, "_publish"), (Generator, "_load")],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("mode", ["boundary", "in_flight"])
def test_an_error_in_any_executor_ends_the_run_with_it(tmp_path, monkeypatch, owner, method, mode):
    def fail(*_args, **_kwargs):
        raise LookupError(f"broken on purpose in {method}")

    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(LookupError, match=f"broken on purpose in {method}") as caught:
        run(tiny_config(tmp_path, schedule={"mode": mode}))
    assert any("executor" in note for note in caught.value.__notes__)


def test_weights_reach_the_generator_and_change(tmp_path):
    """Every version that a token carries had weights of its own: the decoder is never left behind on old ones."""
    seen: dict[int, bytes] = {}
    original = SlotScheduler.swap_weights

    def spy(self, params, version, **options):
        seen[version] = np.asarray(params["layers"][0]["mlp"]["gate_up_proj"]["kernel"]).tobytes()
        original(self, params, version, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotScheduler, "swap_weights", spy)
        record = run(tiny_config(tmp_path, schedule={"num_steps": 5}))
    assert sorted(seen) == [1, 2, 3]  # rounds 0 and 1 use version 0; round 4 uses version 3
    assert len(set(seen.values())) == 3
    assert record.rows[0]["sync/bytes"] > 0


def test_reference_policy_and_entropy_terms_run(tmp_path):
    base = tiny_config(tmp_path)
    trainer = dataclasses.replace(base.trainer, kl=dataclasses.replace(base.trainer.kl, coefficient=0.1), entropy_coefficient=0.01)
    rows = run(tiny_config(tmp_path, trainer=trainer, schedule={"max_staleness": 0})).rows
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl/reference"] > 1e-6


@pytest.mark.parametrize("mode", ["w8a16", "w8a8"])
def test_a_float8_decoder_stays_close_to_the_trainer_after_several_steps_and_syncs(tmp_path, mode):
    """At staleness 0 the distance of π and μ is the rounding alone: it is there, bounded, and does not grow from sync to sync."""
    config = tiny_config(
        tmp_path,
        schedule={"max_staleness": 0, "num_steps": 6, "groups_per_step": 6, "group_size": 8},
        engine={"quantization": QuantizationConfig(mode=mode)},
        weights={"verify": "always"},
    )
    rows = run(config).rows
    plain = dataclasses.replace(
        config, run_dir=str(tmp_path / "plain"), engine=dataclasses.replace(config.engine, quantization=QuantizationConfig())
    )
    assert rows[0]["sync/bytes"] < 0.5 * run(plain).rows[0]["sync/bytes"]  # float8 kernels, float32 embedding
    assert any(row["trainer/grad_norm"] > 0 for row in rows[:-1])
    for row in rows:
        assert 1e-4 < row["mismatch/logprob_abs_mean"] < 0.1
        assert row["mismatch/logprob_abs_max"] < 0.5
        assert row["policy/kl_behaviour"] < 0.01
        assert row["ratio/effective_sample_size"] > 0.98
        assert row["sync/is_verified"] == 1
    assert rows[-1]["mismatch/logprob_abs_mean"] < 3 * rows[0]["mismatch/logprob_abs_mean"]


@pytest.mark.parametrize("dispatch_ahead", [0, 2])
def test_a_run_whose_completions_are_all_cut_off_by_their_deadline(tmp_path, dispatch_ahead):
    """Each has the tokens of one call at least, so it is trained on like any other."""
    options = {"engine": {"dispatch_ahead": dispatch_ahead}, "generator": {"completion_deadline_s": 1e-9}}
    record = run(tiny_config(tmp_path, schedule={"num_steps": 2}, **options))
    completions = [t.completion for _, groups in record.batches for group in groups for t in group.trajectories]
    assert len(completions) == 2 * 12
    assert {c.finish_reason for c in completions} <= {FinishReason.DEADLINE, FinishReason.STOP}
    assert FinishReason.DEADLINE in {c.finish_reason for c in completions}
    assert all(1 <= len(c.token_ids) <= 2 * (1 + dispatch_ahead) for c in completions)
    assert all(row["completion/truncation_rate"] > 0 for row in record.rows)


def test_too_many_slots_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(Policy, "load_params", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"engine\.num_slots.*100000000"):
        run(tiny_config(tmp_path / "run", engine={"num_slots": 100_000_000}))
    assert not (tmp_path / "run").exists()
