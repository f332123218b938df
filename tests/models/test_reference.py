"""Comparisons with transformers' own models, where PyTorch is installed."""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.models.hf_export import export_model
from tests.models.folders import FAMILIES, GOLDEN, load, logits

pytestmark = pytest.mark.reference
torch = pytest.importorskip("torch", reason="PyTorch is not installed; the golden files stand in for it")


def _reference_logits(folder, ids, dtype=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    with torch.no_grad():
        return model(torch.as_tensor(ids, dtype=torch.int64)).logits.float().numpy(), model


@pytest.mark.skipif(
    int(version("transformers").split(".")[0]) < 5, reason="transformers 5 wrote the golden folders; older ones miss their rotary base"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    ids = np.random.default_rng(0).integers(0, 61, (3, 40))
    expected, _ = _reference_logits(GOLDEN / family, ids)
    np.testing.assert_allclose(logits(*load(GOLDEN / family), ids), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export_to_equal_logits(tmp_path, family, max_shard_bytes):
    """The weights are changed first, so that nothing of the source folder can stand in for the export."""
    params, config = load(GOLDEN / family)
    params = jax.tree.map(lambda x: x * 1.125, params)
    export_model(tmp_path / "model", params, config, GOLDEN / family, max_shard_bytes=max_shard_bytes)
    ids = np.random.default_rng(1).integers(0, 61, (2, 30))
    expected, model = _reference_logits(tmp_path / "model", ids)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [2, 3]
    np.testing.assert_allclose(logits(params, config, ids), expected, rtol=1e-5, atol=1e-4)


def test_transformers_loads_a_bfloat16_export(tmp_path):
    params, config = load(GOLDEN / "qwen2", dtype=jnp.bfloat16)
    export_model(tmp_path / "model", params, config, None, dtype=jnp.bfloat16)
    ids = np.random.default_rng(2).integers(0, 61, (2, 16))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected, _ = _reference_logits(tmp_path / "model", ids, torch.float32)
    np.testing.assert_allclose(logits(wide, config, ids), expected, rtol=1e-5, atol=1e-4)
    assert _reference_logits(tmp_path / "model", ids)[1].dtype == torch.bfloat16
