import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.meshes import build_mesh
from llamarl_jax.models import hugging_face
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.hugging_face import hugging_face_names, load_params, tree_key
from llamarl_jax.models.safetensors_files import WeightsError, open_tensors, write_safetensors
from llamarl_jax.models.transformer import TransformerSpec
from tests.models.folders import FAMILIES, GOLDEN, load, one_device


@pytest.fixture
def change(tmp_path):
    """Returns a function that copies a golden folder with some tensors replaced (None takes one away)."""

    def make(family, **replacements):
        folder = tmp_path / family
        shutil.copytree(GOLDEN / family, folder)
        tensors = {**open_tensors(folder), **{name.replace("__", "."): x for name, x in replacements.items()}}
        tensors = {name: np.array(x) for name, x in tensors.items() if x is not None}
        write_safetensors(folder / "model.safetensors", {n: x.shape for n, x in tensors.items()}, np.float32, tensors.items())
        return folder

    return make


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_in_its_leaf_and_layer(family, dtype):
    params, config = load(GOLDEN / family, dtype=dtype)
    tensors = open_tensors(GOLDEN / family)
    names = hugging_face_names(config, params)
    assert sorted(name for group in names.values() for name in group) == sorted(tensors)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.dtype == dtype
        layers = leaf if path[0].key == "layers" else [leaf]
        for name, layer in zip(names[tree_key(path)], layers, strict=True):
            np.testing.assert_array_equal(layer, tensors[name].astype(dtype))


def test_names_of_one_layer():
    params, config = load(GOLDEN / "qwen2")
    names = hugging_face_names(config, params)
    assert names["layers", "attention", "q_proj", "bias"] == [f"model.layers.{i}.self_attn.q_proj.bias" for i in range(2)]
    assert names["layers", "mlp_norm", "scale"][1] == "model.layers.1.post_attention_layernorm.weight"
    assert names["layers", "mlp", "down_proj", "kernel"][0] == "model.layers.0.mlp.down_proj.weight"
    assert names["embed", "embedding"] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2), (8, 1, 1)])
def test_loading_in_pieces_equals_loading_whole(shape):
    mesh = build_mesh(jax.devices(), dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    whole, config = load(GOLDEN / "llama3_scaled")
    pieces, _ = load(GOLDEN / "llama3_scaled", mesh)
    shardings = TransformerSpec.build(config, is_scanned=True).shardings(mesh)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(x.sharding)), pieces, shardings)
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)


class _Recorder(np.ndarray):
    """Counts the elements that are cut from a tensor."""

    reads: list[int]

    def __getitem__(self, index):
        result = np.asarray(self)[index]
        self.reads.append(result.size)
        return result


def test_each_slice_is_read_once_and_none_is_a_whole_split_tensor(monkeypatch):
    """Replicas share one read; 2 × 4 pieces of a kernel are read as eight pieces, not as eight kernels."""
    recorders = {}

    def open_recorded(folder):
        for name, tensor in open_tensors(folder).items():
            recorders[name] = np.array(tensor).view(_Recorder)
            recorders[name].reads = []
        return recorders

    monkeypatch.setattr(hugging_face, "open_tensors", open_recorded)
    load(GOLDEN / "llama3_scaled", build_mesh(jax.devices(), {"data": 2, "fsdp": 2, "tensor": 2}))
    gate = recorders["model.layers.1.mlp.gate_proj.weight"]  # (mlp, embed): cut in 2 × 2, each piece on 2 devices
    assert set(gate.reads) == {gate.size // 4}
    norm = recorders["model.norm.weight"]
    assert set(norm.reads) == {norm.size}
    for recorder in recorders.values():
        # each layer of a stacked leaf is cut once more to learn the shape of the result, which reads nothing from a memory map
        assert recorder.size <= sum(recorder.reads) <= 2 * recorder.size


def _big_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=512,
        valid_vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
    )


def test_host_memory_stays_near_one_leaf(tmp_path):
    """The model has 34 MB in float32, its largest stacked leaf 8.4 MB. Only what NumPy allocates is traced, not what JAX keeps."""
    config = _big_config()
    spec = TransformerSpec.build(config, is_scanned=True)
    names = hugging_face_names(config, spec.shapes)
    shapes = {
        name: leaf.shape[1:] if path[0].key == "layers" else leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec.shapes)
        for name in names[tree_key(path)]
    }
    write_safetensors(
        tmp_path / "model.safetensors", shapes, jnp.bfloat16, ((name, np.ones(s, jnp.bfloat16)) for name, s in shapes.items())
    )
    shardings = spec.shardings(one_device())
    largest = max(leaf.size for leaf in jax.tree.leaves(spec.shapes)) * 4
    peaks = []

    def observe(*args, **kwargs):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = jax.block_until_ready(original(*args, **kwargs))
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return result

    original = hugging_face._load_leaf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "_load_leaf", observe)
        tracemalloc.start()
        params = load_params(tmp_path, config, shardings, jnp.float32)
        tracemalloc.stop()
    assert params["layers"]["mlp"]["up_proj"]["kernel"].dtype == jnp.float32
    assert 0.9 * largest < max(peaks) < 1.2 * largest


def test_a_tied_model_may_hold_its_head_again(change):
    folder = change("qwen2", lm_head__weight=np.ones((61, 32), np.float32))
    params, _ = load(folder)
    assert "lm_head" not in params


def test_missing_tensor(change):
    folder = change("qwen2", model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(
        WeightsError, match=r"qwen2 has no tensor 'model.layers.1.self_attn.k_proj.bias' of shape \(16,\); the weights do not"
    ):
        load(folder)


def test_wrong_shape(change):
    folder = change("qwen3", model__layers__0__self_attn__q_norm__weight=np.ones(8))
    with pytest.raises(
        WeightsError, match=r"model.safetensors: tensor '.*q_norm.weight' has shape \(8,\), but config.json asks for \(16,\)"
    ):
        load(folder)


def test_unexpected_tensor(change):
    folder = change("llama3_scaled", model__layers__0__self_attn__q_proj__bias=np.ones(32))
    with pytest.raises(WeightsError, match=r"1 tensors are not explained by config.json, such as '.*q_proj.bias' of shape \(32,\)"):
        load(folder)


def test_frequencies_that_old_files_hold_are_ignored(change):
    load(change("smollm2", model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(8)))
