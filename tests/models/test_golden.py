"""Logits equal those that transformers gave (`golden/make_goldens.py`), for one small random model of each family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.hugging_face import tree_key
from tests.models.folders import FAMILIES, GOLDEN, load, logits


def _expected(family: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(GOLDEN / family / "expected.npz") as arrays:
        return arrays["token_ids"], arrays["logits"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_golden_ones(family):
    ids, expected = _expected(family)
    np.testing.assert_allclose(logits(*load(GOLDEN / family), ids), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_on_a_mesh_of_eight(family):
    """Loaded in pieces and computed in pieces; the odd head count of smollm2 stays whole on the tensor axis."""
    mesh = build_mesh(jax.devices(), {"data": 2, "fsdp": 2, "tensor": 2})
    ids, expected = _expected(family)
    params, config = load(GOLDEN / family, mesh)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(logits(params, config, np.repeat(ids, 2, axis=0)), np.repeat(expected, 2, axis=0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("qwen2", ("layers", "attention", "q_proj", "bias")),
        ("qwen2", ("layers", "attention", "v_proj", "bias")),
        ("qwen3", ("layers", "attention", "q_norm", "scale")),
        ("qwen3", ("layers", "attention", "k_norm", "scale")),
        ("llama3_scaled", ("layers", "mlp_norm", "scale")),
        ("llama3_scaled", ("lm_head", "kernel")),
    ],
)
def test_the_golden_files_see_every_kind_of_parameter(family, path):
    """A golden file guards nothing that it does not depend on."""
    ids, expected = _expected(family)
    params, config = load(GOLDEN / family)
    fresh = jnp.ones_like if path[-1] == "scale" else jnp.zeros_like
    params = jax.tree_util.tree_map_with_path(lambda keys, x: fresh(x) if tree_key(keys) == path else x, params)
    assert np.abs(logits(params, config, ids) - expected).max() > 0.01


@pytest.mark.parametrize(
    "change", [{"rope_scaling": None}, {"rope_theta": 400.0}, {"rms_norm_eps": 1e-2}, {"factor": 9.0}, {"low_freq_factor": 1.1}]
)
def test_the_golden_files_see_the_rotary_scaling_and_epsilon(change):
    ids, expected = _expected("llama3_scaled")
    params, config = load(GOLDEN / "llama3_scaled")
    assert config.rope_scaling is not None
    is_scaling = hasattr(config.rope_scaling, next(iter(change)))
    change = {"rope_scaling": dataclasses.replace(config.rope_scaling, **change)} if is_scaling else change
    assert np.abs(logits(params, dataclasses.replace(config, **change), ids) - expected).max() > 1e-3
