import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.bench.options import DecodeOptions
from llamarl_jax.bench.workload import SHAPES, make_prompts, open_workload
from llamarl_jax.models.config import ModelConfig

SMALL = ModelConfig(
    vocab_size=32, valid_vocab_size=30, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    eos_token_ids=(2,), bos_token_id=1, pad_token_id=0,
)  # fmt: skip


def test_prompts_are_distinct_and_of_known_plain_ids():
    prompts = make_prompts(SMALL, count=20, num_tokens=16, seed=0)
    assert len({tuple(prompt) for prompt in prompts}) == 20
    ids = np.array(prompts)
    assert ids.shape == (20, 16)
    assert ids.min() > 2
    assert ids.max() < 30
    assert prompts == make_prompts(SMALL, count=20, num_tokens=16, seed=0)


def test_samples_of_a_prompt_follow_each_other():
    prompts = make_prompts(SMALL, count=7, num_tokens=16, seed=0, samples=3)
    assert [prompts.index(prompt) for prompt in prompts] == [0, 0, 0, 3, 3, 3, 6]
    assert prompts[::3] == make_prompts(SMALL, count=3, num_tokens=16, seed=0)


def test_a_shape_gets_random_weights_of_the_wanted_type(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL)
    workload = open_workload(DecodeOptions(model="small", dtype="bfloat16"))
    found = jax.tree.map(lambda x: (x.shape, x.dtype), workload.params)
    assert found == jax.tree.map(lambda x: (x.shape, x.dtype), workload.spec.decoder_shapes(jnp.bfloat16))
    kernels = [np.asarray(layer["mlp"]["gate_up_proj"]["kernel"], np.float32) for layer in workload.params["layers"].values()]
    assert not np.array_equal(kernels[0], kernels[1])
    assert kernels[0].std() == pytest.approx(0.02, rel=0.3)
    assert workload.folder is None


def test_a_folder_keeps_its_place_to_itself(tmp_path):
    from llamarl_jax.models.tiny import write_tiny_model

    (tmp_path / "mine").mkdir()
    write_tiny_model(tmp_path / "mine")
    workload = open_workload(DecodeOptions(model=str(tmp_path / "mine")))
    assert workload.name == "mine"
    assert str(tmp_path) not in workload.origin
