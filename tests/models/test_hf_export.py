import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.meshes import build_mesh
from llamarl_jax.models import hf_export
from llamarl_jax.models.hf_config import from_hugging_face
from llamarl_jax.models.hf_export import export_model
from llamarl_jax.models.safetensors_files import open_tensors
from llamarl_jax.models.tiny import write_tiny_model
from llamarl_jax.models.transformer import TransformerSpec
from tests.models.folders import FAMILIES, GOLDEN, load, one_device

SHARD_SIZES = [10**9, 20_000, 1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", SHARD_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_export_then_load_gives_every_bit_back(tmp_path, family, max_shard_bytes, dtype):
    params, config = load(GOLDEN / family, dtype=dtype)
    folder = export_model(tmp_path / "model", params, config, None, dtype=dtype, max_shard_bytes=max_shard_bytes)
    again, config_again = load(folder, dtype=dtype)
    assert config_again == config
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), again, params)
    source = open_tensors(GOLDEN / family)
    written = open_tensors(folder)
    assert written.keys() == source.keys()
    for name, tensor in written.items():
        assert tensor.tobytes() == source[name].astype(dtype).tobytes(), name


def test_export_from_a_mesh_of_eight_equals_export_from_one_device(tmp_path):
    mesh = build_mesh(jax.devices(), {"data": 2, "fsdp": 2, "tensor": 2})
    for name, devices in (("one", one_device()), ("eight", mesh)):
        export_model(tmp_path / name, *load(GOLDEN / "llama3_scaled", devices), None)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "eight/model.safetensors").read_bytes()


def test_the_index_is_complete_and_files_keep_their_size(tmp_path):
    params, config = load(GOLDEN / "llama3_scaled")
    folder = export_model(tmp_path / "model", params, config, None, max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == open_tensors(GOLDEN / "llama3_scaled").keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    for file in files:
        names = [name for name, place in index["weight_map"].items() if place == file]
        assert sum(open_tensors(folder)[name].nbytes for name in names) <= 20_000


def test_tokenizer_and_generation_settings_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write_tiny_model(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 7]}')
    params, config = load(source)
    folder = export_model(tmp_path / "model", params, config, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "eos_token_id": [2, 7], "bos_token_id": 1, "pad_token_id": 0}
    assert from_hugging_face(folder) == config
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_an_existing_folder_is_kept_unless_it_is_to_be_replaced(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "precious.txt").write_text("x")
    params, config = load(GOLDEN / "qwen2")
    with pytest.raises(FileExistsError, match="model exists; choose another output folder or remove it"):
        export_model(folder, params, config, None)
    assert [path.name for path in folder.iterdir()] == ["precious.txt"]
    export_model(folder, params, config, None, replaces=True)
    assert not (folder / "precious.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_crash_in_the_middle_leaves_nothing_half_written(tmp_path, monkeypatch, replaces):
    params, config = load(GOLDEN / "qwen2")
    if replaces:
        export_model(tmp_path / "model", params, config, None)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    write = hf_export.write_safetensors

    def write_then_fail(path, *args):
        write(path, *args)
        if "00002" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(hf_export, "write_safetensors", write_then_fail)
    with pytest.raises(KeyboardInterrupt):
        export_model(tmp_path / "model", params, config, None, max_shard_bytes=20_000, replaces=replaces)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_parameters_of_another_form_or_model_are_refused(tmp_path):
    params, config = load(GOLDEN / "qwen2")
    listed = TransformerSpec.build(config, is_scanned=False).init(0, one_device())
    with pytest.raises(ValueError, match=r"parameter \['layers'\].* has shape .*, but the stacked form of this model has"):
        export_model(tmp_path / "model", listed, config, None)
    with pytest.raises(ValueError, match=r"has shape \(2, 32, 40\), but the stacked form of this model has \(2, 32, 44\) there; export"):
        export_model(tmp_path / "model", params, dataclasses.replace(config, intermediate_size=44), None)
    with pytest.raises(ValueError, match="weights cannot be exported as int8; choose one of float32, float16, bfloat16, float64"):
        export_model(tmp_path / "model", params, config, None, dtype=np.int8)
    assert list(tmp_path.iterdir()) == []


def test_host_memory_stays_near_one_tensor(tmp_path):
    """An array keeps its fetched value, so that fetching leaves themselves leaves the whole model on the host."""
    params, config = load(GOLDEN / "llama3_scaled")
    config = dataclasses.replace(config, hidden_size=256, intermediate_size=1024, num_layers=8)
    params = TransformerSpec.build(config, is_scanned=True).init(0, build_mesh(jax.devices()[:4], {"data": 1, "fsdp": 4, "tensor": 1}))
    largest = params["layers"]["mlp"]["up_proj"]["kernel"].nbytes // config.num_layers
    export_model(tmp_path / "warm_up", jax.tree.map(jnp.copy, params), config, None)  # compiles
    tracemalloc.start()
    export_model(tmp_path / "model", params, config, None, dtype=jnp.bfloat16)
    rest, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest
    assert rest < largest / 4
