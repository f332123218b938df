import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.data.packing import Packing, pack
from llamarl_jax.executors.trainer import _with_advantage
from llamarl_jax.losses.kl import KlConfig
from llamarl_jax.losses.normalisation import denominator
from llamarl_jax.meshes import build_mesh
from llamarl_jax.train_step import OptimizerConfig, StepSums, TrainerConfig, TrainState, TrainStep
from llamarl_jax.types import Completion, FinishReason, Prompt, Trajectory, TrajectoryBatch, TrajectoryGroup
from tests.engine.tiny_engine import CONFIG, STACKED, random_params

ROW_LENGTH = 24


def _groups(order: tuple[int, ...] = (0, 1, 2, 3)) -> list[TrajectoryGroup]:
    groups = []
    for index in order:
        random = np.random.default_rng(index)
        trajectories = tuple(
            Trajectory(
                completion=Completion(
                    sample_index=sample,
                    token_ids=random.integers(0, 290, n := int(random.integers(2, 9))).astype(np.int32),
                    behaviour_logprobs=-random.uniform(3, 8, n).astype(np.float32),
                    weight_versions=np.zeros(n, np.int32),
                    finish_reason=FinishReason.STOP,
                ),
                reward=0.0,
                advantage=float(random.normal()),
                reward_terms={},
            )
            for sample in range(4)
        )
        prompt = Prompt(prompt_id=index, token_ids=random.integers(0, 290, 3 + index).astype(np.int32), text="")
        groups.append(TrajectoryGroup(prompt=prompt, admission_index=index, version_class=0, trajectories=trajectories))
    return groups


@pytest.fixture(scope="module")
def params():
    return jax.device_get(random_params(STACKED))


def _new_step(shape=(1, 1, 1), num_steps: int = 10, **options) -> TrainStep:
    mesh = build_mesh(jax.devices()[: int(np.prod(shape))], dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    config = TrainerConfig(**{"rows_per_microbatch": 8, "row_length": ROW_LENGTH, **options})
    return TrainStep(STACKED, mesh, config, num_steps=num_steps, temperature=1.0)


_step = functools.cache(_new_step)  # tests with the same options share the compiled programs


def _sums(step: TrainStep, params, groups=None, *, packing: Packing = "shared_prompts", reference=None) -> StepSums:
    placed = jax.device_put(params, STACKED.shardings(step.mesh))
    num_rows = step.config.rows_per_microbatch
    batch, _ = pack(groups or _groups(), row_length=ROW_LENGTH, num_rows_multiple=num_rows, step=0, packing=packing)
    total = denominator(batch, step.config.normalisation, max_tokens=8)
    sums = None
    for first in range(0, len(batch.token_ids), num_rows):
        rows = TrajectoryBatch(*(x[first : first + num_rows] for x in batch))
        sums = step.accumulate(placed, sums, step.place(rows), total, reference)
    assert sums is not None
    return sums


def _assert_close(first, second, rtol: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(a) + 1e-7


@pytest.mark.parametrize(("normalisation", "splits"), [("token_mean", (1, 2, 4)), ("sequence_mean", (1, 2, 4)), ("constant", (2,))])
def test_any_split_into_microbatches_any_order_and_packing_give_the_same_gradient(params, normalisation, splits):
    whole = _sums(_step(normalisation=normalisation), params)
    assert float(np.abs(whole.grads["embed"]["embedding"]).max()) > 1e-4
    for num_rows in splits:
        _assert_close(whole.grads, _sums(_step(normalisation=normalisation, rows_per_microbatch=num_rows), params).grads)
    _assert_close(whole.grads, _sums(_step(normalisation=normalisation), params, _groups((2, 0, 3, 1))).grads)
    for packing in ("trajectories", "none"):
        other = _sums(_step(normalisation=normalisation), params, packing=packing)
        _assert_close(whole.grads, other.grads)
        assert float(other.loss) == pytest.approx(float(whole.loss), rel=1e-4)
        for name, value in whole.metrics.items():
            assert float(other.metrics[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-4), name


def test_leaving_out_zero_advantages_changes_no_gradient(params):
    groups = _groups()
    flat = tuple(dataclasses.replace(t, advantage=0.0) for t in groups[1].trajectories)
    groups[1] = dataclasses.replace(groups[1], trajectories=flat)
    step = _step()
    everything, _ = pack(groups, row_length=ROW_LENGTH, num_rows_multiple=8, step=0)
    total = denominator(everything, "token_mean", max_tokens=8)
    placed = jax.device_put(params, STACKED.shardings(step.mesh))
    fewer, _ = pack([_with_advantage(g) for g in groups], row_length=ROW_LENGTH, num_rows_multiple=8, step=0)
    assert fewer.loss_mask.sum() < everything.loss_mask.sum()
    # An empty microbatch, as a batch of equal rewards only would give, is harmless too.
    empty, _ = pack([], row_length=ROW_LENGTH, num_rows_multiple=8, step=0)
    sums = step.accumulate(placed, None, step.place(empty), total, None)
    first_rows = TrajectoryBatch(*(x[:8] for x in fewer))
    _assert_close(_sums(step, params, groups).grads, step.accumulate(placed, sums, step.place(first_rows), total, None).grads)
    with pytest.raises(ValueError, match=r"leaves_out_zero_advantages is on, but kl.coefficient = 0.5"):
        TrainerConfig(leaves_out_zero_advantages=True, kl=KlConfig(coefficient=0.5))
    with pytest.raises(ValueError, match=r"leaves_out_zero_advantages is on, but kl.coefficient = 0.0 and entropy_coefficient = 0.1"):
        TrainerConfig(leaves_out_zero_advantages=True, entropy_coefficient=0.1)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (8, 1, 1), (1, 2, 2)])
def test_every_mesh_gives_the_same_gradient(params, shape):
    _assert_close(_sums(_step(), params).grads, _sums(_step(shape), params).grads, rtol=1e-4)


def test_rematerialisation_and_bfloat16(params):
    plain = _sums(_step(), params)
    _assert_close(plain.grads, _sums(_step(is_rematerialised=True), params).grads)
    half = _sums(_step(compute_dtype="bfloat16"), params)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(half.grads))
    _assert_close(plain.grads["embed"], half.grads["embed"], rtol=0.1)


def test_the_first_update_is_adams(params):
    step = _step(optimizer=OptimizerConfig(learning_rate=1e-3, max_grad_norm=1e9))
    sums = _sums(step, params)
    grads = np.asarray(sums.grads["embed"]["embedding"])
    state, metrics = step.update(step.init_state(jax.device_put(params, STACKED.shardings(step.mesh))), sums)
    moved = np.asarray(state.params["embed"]["embedding"]) - params["embed"]["embedding"]
    is_large = np.abs(grads) > 1e-5
    np.testing.assert_allclose(moved[is_large], -1e-3 * np.sign(grads[is_large]), rtol=2e-2)
    assert int(state.step) == 1
    assert float(metrics["learning_rate"]) == pytest.approx(1e-3)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(sums.grads)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)


def test_a_non_finite_gradient_leaves_the_state_bit_identical_and_alarms(params):
    step = _step()
    groups = _groups()
    broken = dataclasses.replace(groups[0].trajectories[0], advantage=float("inf"))
    groups[0] = dataclasses.replace(groups[0], trajectories=(broken, *groups[0].trajectories[1:]))
    state = step.init_state(jax.device_put(params, STACKED.shardings(step.mesh)))
    before = jax.device_get(state)
    after, metrics = step.update(state, _sums(step, params, groups))
    assert float(metrics["is_skipped"]) == 1
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before[:2], jax.device_get(after)[:2])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_to_the_start_policy_pulls_back_only_after_it_was_left(params, estimator):
    step = _step(kl=KlConfig(coefficient=1.0, estimator=estimator), optimizer=OptimizerConfig(learning_rate=3e-2))
    placed = jax.device_put(params, STACKED.shardings(step.mesh))
    with_kl = _sums(step, params, reference=placed)
    assert float(with_kl.metrics["sum/kl/reference"]) == pytest.approx(0, abs=1e-5)
    _assert_close(_sums(_step(), params).grads, with_kl.grads)
    state = step.init_state(jax.device_put(params, STACKED.shardings(step.mesh)))  # its own copy: the update donates it
    moved = jax.device_get(step.update(state, with_kl)[0].params)
    after = _sums(step, moved, reference=placed)
    distance = float(after.metrics["sum/kl/reference"])
    assert distance > 0.01
    # The KL term's own gradient, now not zero, points away from the reference: a step against it comes nearer.
    pull = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.grads, _sums(_step(), moved).grads)
    norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(pull)))
    assert norm > 1e-3
    nearer = jax.tree.map(lambda p, d: p - (0.02 / norm * d).astype(np.float32), moved, pull)
    assert float(_sums(step, nearer, reference=placed).metrics["sum/kl/reference"]) < distance


def test_nan_under_the_mask_of_a_batch_is_harmless(params):
    step = _step()
    batch, _ = pack(_groups(), row_length=ROW_LENGTH, num_rows_multiple=8, step=0)
    rows = TrajectoryBatch(*(x[:8] for x in batch))
    is_loss = rows.loss_mask > 0
    assert not is_loss.all()
    dirty = rows._replace(
        behaviour_logprobs=np.where(is_loss, rows.behaviour_logprobs, np.nan).astype(np.float32),
        advantages=np.where(is_loss, rows.advantages, np.inf).astype(np.float32),
    )
    placed = jax.device_put(params, STACKED.shardings(step.mesh))
    clean_sums, dirty_sums = (step.accumulate(placed, None, step.place(x), 1.0, None) for x in (rows, dirty))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(clean_sums), jax.device_get(dirty_sums))


def test_entropy_bonus_raises_entropy(params):
    def entropy(p):
        return float(_sums(_step(), p).metrics["sum/policy/entropy"])

    plain, bonus = _sums(_step(), params), _sums(_step(entropy_coefficient=1.0), params)
    direction = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), plain.grads, bonus.grads)
    assert entropy(jax.tree.map(lambda p, d: p + 0.01 * d, params, direction)) > entropy(params)


def test_learning_rate_schedules():
    warm = OptimizerConfig(learning_rate=1.0, warmup_steps=4).learning_rate_schedule(10)
    assert [np.asarray(warm(i)).item() for i in (0, 3, 4, 9)] == pytest.approx([0.25, 1.0, 1.0, 1.0])
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear").learning_rate_schedule(10)
    assert [np.asarray(linear(i)).item() for i in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    cosine = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=2).learning_rate_schedule(10)
    assert np.asarray(cosine(10)).item() == pytest.approx(0.0, abs=1e-6)


def test_one_program_serves_any_number_of_microbatches(params):
    step = _new_step(rows_per_microbatch=2)
    for num_groups in (2, 3, 4):
        _sums(step, params, _groups(tuple(range(num_groups))))
    assert step._gradient._cache_size() == step._add._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_the_abstract_state_matches_the_real_one(params):
    step = _step((1, 2, 2))
    state = step.init_state(jax.device_put(params, STACKED.shardings(step.mesh)))
    abstract: TrainState = step.abstract_state()
    for real, shape in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (real.shape, real.dtype) == (shape.shape, shape.dtype)
        assert real.sharding.is_equivalent_to(shape.sharding, real.ndim)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == state.params["embed"]["embedding"].shape]
    assert all(x.addressable_shards[0].data.shape == (CONFIG.vocab_size // 2, CONFIG.hidden_size // 2) for x in moments)
    assert len(moments) == 2


def test_errors():
    with pytest.raises(ValueError, match=r"trainer.rows_per_microbatch = 3 cannot be split over 4 devices"):
        _step((2, 2, 1), rows_per_microbatch=3)
    with pytest.raises(ValueError, match=r"optimizer.learning_rate = 0.0 .*must be above 0"):
        OptimizerConfig(learning_rate=0.0)
    with pytest.raises(ValueError, match=r"optimizer.max_grad_norm = -1.0: both must be above 0"):
        OptimizerConfig(max_grad_norm=-1.0)
