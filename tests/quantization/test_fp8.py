from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.transformer import UNKNOWN_ID_LOGIT, TransformerSpec
from llamarl_jax.quantization.fp8 import LARGEST, Mode, QuantizationConfig, fp8_product, quantize, quantize_kernels
from tests.engine.tiny_engine import CONFIG

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FINITE))
def test_no_finite_input_gives_a_nan_and_every_value_is_close(x):
    values, scale = jax.device_get(jax.jit(quantize)(x))
    values = values.astype(np.float64)
    assert np.isfinite(values).all()
    assert np.isfinite(scale).all()
    assert (np.abs(values) <= LARGEST).all()
    # Relative 2⁻⁴ for normal numbers, half of the smallest step (2⁻⁹) of the row's scale below them.
    error = np.abs(values * scale.astype(np.float64)[:, None] - x)
    assert (error <= np.maximum(np.abs(x).astype(np.float64) * 2.0**-4, scale[:, None] * 2.0**-10) * (1 + 1e-6)).all()


def test_the_largest_value_of_a_row_is_exact_and_a_row_of_zeros_stays_zero():
    x = np.array([[0.0, 3.0, -1.5], [0.0, 0.0, 0.0], [1e-42, 0.0, 0.0]], np.float32)
    values, scale = quantize(jnp.asarray(x))
    assert values[0].astype(jnp.float32).tolist() == [0.0, 448.0, -224.0]
    assert float(scale[0]) == pytest.approx(3 / 448)
    assert (values[1].astype(jnp.float32) == 0).all()


@pytest.mark.parametrize("mode", ["w8a16", "w8a8"])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_of_the_rounded_factors(mode: Mode, rows, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, 1, 64)), dtype)
    kernel, scale = quantize(jnp.asarray(random.normal(size=(48, 64)) * random.lognormal(size=(48, 1)), jnp.float32))
    wide = np.asarray(kernel.astype(jnp.float32), np.float64) * np.asarray(scale, np.float64)[:, None]
    left = np.asarray(x, np.float64)
    if mode == "w8a8":
        values, row_scale = quantize(x)
        left = np.asarray(values.astype(jnp.float32), np.float64) * np.asarray(row_scale, np.float64)[..., None]
    result = fp8_product(x, kernel, scale, mode)
    assert result.dtype == jnp.float32
    assert result.shape == (rows, 1, 48)
    np.testing.assert_allclose(np.asarray(result, np.float64), left @ wide.T, rtol=1e-5, atol=1e-5 * np.abs(wide).max())


def test_the_table_says_which_kernels_are_float8():
    layer = {
        "attention_norm": {"scale": jnp.ones(4)},
        "attention": {"qkv_proj": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(8)}, "o_proj": {"kernel": jnp.ones((4, 4))}},
        "mlp": {"down_proj": {"kernel": jnp.ones((4, 8))}},
    }
    config = QuantizationConfig(mode="w8a16", kernels=("qkv_proj", "down_proj"))
    done = quantize_kernels(layer, config)
    assert done["attention"]["qkv_proj"]["kernel"].dtype == jnp.float8_e4m3fn
    assert set(done["attention"]["qkv_proj"]) == {"kernel", "kernel_scale", "bias"}
    assert set(done["attention"]["o_proj"]) == {"kernel"}
    assert done["mlp"]["down_proj"]["kernel_scale"].shape == (4,)
    assert quantize_kernels(layer, QuantizationConfig()) == layer
    with pytest.raises(
        ValueError, match=r"quantization.kernels has \['embed'\]; only qkv_proj, o_proj, gate_up_proj, down_proj, lm_head can"
    ):
        QuantizationConfig(mode="w8a8", kernels=("embed",))


def test_an_lm_head_of_its_own_can_be_float8_too():
    """Ids that the tokenizer does not know keep their logit; all others are those of the rounded head."""
    quantization = QuantizationConfig(mode="w8a16", kernels=("lm_head",))
    config = replace(CONFIG, is_tied_embedding=False)
    spec = TransformerSpec.build(config, is_scanned=False, quantization=quantization)
    params = spec.init(0, build_mesh(jax.devices()[:1], {"data": 1, "tensor": 1}))
    head = params["lm_head"]
    assert head["kernel"].dtype == jnp.float8_e4m3fn
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, config.hidden_size)), jnp.float32)
    logits = np.asarray(spec.bind(params).logits(hidden))
    expected = np.asarray(hidden) @ (np.asarray(head["kernel"], np.float32) * np.asarray(head["kernel_scale"])[:, None]).T
    known = config.valid_vocab_size
    np.testing.assert_allclose(logits[:, :known], expected[:, :known], rtol=1e-5, atol=1e-5)
    assert (logits[:, known:] == UNKNOWN_ID_LOGIT).all()
    assert "kernel_scale" not in TransformerSpec.build(config, is_scanned=True, quantization=quantization).shapes["lm_head"]
    with pytest.raises(ValueError, match=r"quantization.kernels has lm_head, but this model's LM head is its embedding"):
        TransformerSpec.build(CONFIG, is_scanned=False, quantization=quantization)
