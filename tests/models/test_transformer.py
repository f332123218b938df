import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.kv_cache import init_cache
from llamarl_jax.models.prompt_index import index_prompts
from llamarl_jax.models.rope import rope_tables
from llamarl_jax.models.transformer import UNKNOWN_ID_LOGIT, TransformerSpec, gate_up_block
from tests.engine.tiny_engine import CONFIG, LISTED, STACKED, random_params, unstack

LENGTH = 20


@pytest.fixture(scope="module")
def params():
    return random_params(STACKED)


def _ids(rows: int = 2, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, CONFIG.valid_vocab_size, (rows, LENGTH)), jnp.int32)


def _logits(spec, params, ids, segments=None, positions=None, **options):
    segments = jnp.ones_like(ids) if segments is None else segments
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape) if positions is None else positions

    @jax.jit
    def run(params):
        model = spec.bind(params)
        return model.logits(model(ids, positions, segments, **options))

    return run(params)


def test_scanned_and_listed_layers_agree(params):
    ids = _ids()
    np.testing.assert_allclose(_logits(STACKED, params, ids), _logits(LISTED, unstack(params), ids), atol=1e-4)


def test_bfloat16_is_close_to_float32(params):
    ids = _ids()
    exact, rounded = _logits(STACKED, params, ids), _logits(STACKED, params, ids, dtype=jnp.bfloat16)
    assert 1e-4 < float(jnp.abs(exact - rounded).mean()) < 0.05 * float(jnp.std(exact))


def test_decoding_token_by_token_equals_the_full_forward(params):
    ids = _ids()
    full = _logits(STACKED, params, ids)
    model = LISTED.bind(unstack(params))
    step = jax.jit(lambda token, start, cache: model.extend(token, start, cache))
    cache = init_cache(CONFIG, 2, LENGTH + 5, "float32")
    rows = []
    for t in range(LENGTH):
        hidden, cache = step(ids[:, t : t + 1], jnp.full(2, t, jnp.int32), cache)
        rows.append(model.logits(hidden[:, 0]))
    np.testing.assert_allclose(jnp.stack(rows, 1), full, atol=1e-4)


def test_steps_behind_a_shared_prompt_equal_the_full_forward(params):
    """Three completions of one prompt and one of another, of which each prompt is cached once, all but its last token."""
    prompts, ids = _ids()[:, :9], jnp.concatenate([_ids()[jnp.array([0, 0, 1, 0]), :9], _ids(4, seed=3)[:, 9:]], axis=1)
    rows, num_shared = jnp.array([1, 1, 0, 1]), jnp.array([8, 8, 5, 8])
    ids = ids.at[2].set(jnp.roll(ids[2], -3))  # a prompt of six tokens
    full = _logits(STACKED, params, ids)
    model = LISTED.bind(unstack(params))
    _, prefix = model.extend(jnp.stack([ids[2, :8], prompts[0, :8]]), jnp.zeros(2, jnp.int32), init_cache(CONFIG, 2, 16, "float32"))
    index = index_prompts(rows, num_shared, jnp.ones(4, bool), num_prompts=2, most_members=3, num_replicas=1)
    cache = init_cache(CONFIG, 4, LENGTH, "float32")

    @jax.jit
    def step(tokens, positions, cache):
        return model.step(tokens, rope_tables(CONFIG, positions[:, None]), cache, positions - num_shared, prefix, index)

    for t in range(LENGTH - 8):
        positions = num_shared + t
        hidden, cache = step(ids[jnp.arange(4), positions], positions, cache)
        np.testing.assert_allclose(model.logits(hidden), full[jnp.arange(4), positions], atol=1e-4)


def test_prefill_in_two_chunks_equals_one(params):
    ids = _ids()
    model = LISTED.bind(unstack(params))
    empty = init_cache(CONFIG, 2, LENGTH, "float32")
    whole, _ = model.extend(ids, jnp.zeros(2, jnp.int32), empty)
    _, cache = model.extend(ids[:, :13], jnp.zeros(2, jnp.int32), empty)
    rest, _ = model.extend(ids[:, 13:], jnp.full(2, 13, jnp.int32), cache)
    np.testing.assert_allclose(rest, whole[:, 13:], atol=1e-4)


def test_packed_sequences_equal_separate_rows_and_do_not_see_each_other(params):
    ids = _ids()
    first, second = ids[0, :8], ids[1, :9]
    packed = jnp.zeros((1, LENGTH), jnp.int32).at[0, :8].set(first).at[0, 8:17].set(second)
    segments = jnp.zeros((1, LENGTH), jnp.int32).at[0, :8].set(1).at[0, 8:17].set(2)
    positions = jnp.zeros((1, LENGTH), jnp.int32).at[0, :8].set(jnp.arange(8)).at[0, 8:17].set(jnp.arange(9))
    together = _logits(STACKED, params, packed, segments, positions)[0]
    np.testing.assert_allclose(together[:8], _logits(STACKED, params, first[None])[0], atol=1e-4)
    np.testing.assert_allclose(together[8:17], _logits(STACKED, params, second[None])[0], atol=1e-4)
    perturbed = _logits(STACKED, params, packed.at[0, 3].set((packed[0, 3] + 1) % 100), segments, positions)[0]
    np.testing.assert_array_equal(perturbed[8:17], together[8:17])
    assert not np.array_equal(perturbed[3:8], together[3:8])


def test_padding_gives_finite_values_and_gradients(params):
    ids, segments = _ids(1), jnp.zeros((1, LENGTH), jnp.int32).at[0, :5].set(1)

    def total(params):
        model = STACKED.bind(params)
        return jnp.where(segments > 0, model(ids, jnp.zeros_like(ids), segments).sum(-1), 0).sum()

    value, grads = jax.value_and_grad(total)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_ids_unknown_to_the_tokenizer_are_masked(params):
    logits = _logits(STACKED, params, _ids())
    assert (logits[..., CONFIG.valid_vocab_size :] == UNKNOWN_ID_LOGIT).all()
    assert (logits[..., : CONFIG.valid_vocab_size] > -1e4).all()


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (1, 1, 4), (8, 1, 1), (1, 2, 4)])
def test_every_mesh_gives_the_same_logits(params, shape):
    """(1, 1, 4) and (1, 2, 4) cut four query heads, but two key-value heads stay whole."""
    mesh = build_mesh(jax.devices()[: int(np.prod(shape))], dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    ids = _ids(8)
    expected = _logits(STACKED, params, ids)
    placed = jax.device_put(jax.device_get(params), STACKED.shardings(mesh))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(_logits(STACKED, placed, ids), expected, atol=1e-4)


def test_rematerialisation_changes_no_gradient(params):
    ids = _ids()

    def loss(params, is_rematerialised):
        model = STACKED.bind(params)
        hidden = model(ids, jnp.broadcast_to(jnp.arange(LENGTH), ids.shape), jnp.ones_like(ids), is_rematerialised=is_rematerialised)
        return jnp.square(model.logits(hidden)[..., :50]).mean()

    plain, again = (jax.jit(jax.grad(lambda p, flag=flag: loss(p, flag)))(params) for flag in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again)


def test_bfloat16_compute_stays_close_and_keeps_float32_logits(params):
    ids = _ids()
    half = _logits(STACKED, params, ids, dtype=jnp.bfloat16)
    assert half.dtype == jnp.float32
    assert float(jnp.abs(half - _logits(STACKED, params, ids))[..., : CONFIG.valid_vocab_size].mean()) < 0.05


def test_depth_does_not_grow_the_program():
    """126 layers trace to the same program as two, so that they compile in seconds."""

    def num_equations(num_layers: int) -> int:
        spec = TransformerSpec.build(dataclasses.replace(CONFIG, num_layers=num_layers), is_scanned=True)
        ids = jnp.zeros((1, 8), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda p: spec.bind(p)(ids, ids, jnp.ones_like(ids)))(spec.shapes)
        return str(jaxpr).count("\n")

    assert num_equations(126) == num_equations(2)


def test_init_lies_in_its_sharding():
    mesh = build_mesh(jax.devices(), {"data": 2, "fsdp": 2, "tensor": 2})
    params = STACKED.init(0, mesh)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(x.sharding)), params, STACKED.shardings(mesh))
    assert params["embed"]["embedding"].addressable_shards[0].data.shape == (CONFIG.vocab_size // 2, CONFIG.hidden_size // 2)


@pytest.mark.parametrize(
    ("size", "block"), [(96, 1), (1536, 8), (4864, 4), (8960, 4), (14336, 32), (28672, 64), (53248, 64), (131072, 128), (7, 1)]
)
def test_a_fused_mlp_can_be_cut_over_as_many_devices_as_its_parts(size, block):
    config = dataclasses.replace(CONFIG, intermediate_size=size)
    assert gate_up_block(config) == block
    for num_devices in (2, 4, 8, 16, 32, 64):
        assert (size // block % num_devices == 0) == (size % num_devices == 0)
