import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from llamarl_jax.models.safetensors_files import WeightsError, file_of, open_tensors, write_safetensors

TENSORS = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "a": np.array(3.5, np.float32),
    "c": np.arange(5, dtype=np.float32),
    "none": np.empty((0, 4), np.float32),
}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}


def _write(path, dtype=np.float32):
    write_safetensors(path, SHAPES, dtype, TENSORS.items())


def _with_header(path, header, num_bytes):
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(num_bytes))


def test_the_library_reads_what_is_written(tmp_path):
    _write(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            np.testing.assert_array_equal(file.get_tensor(name), tensor, strict=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_every_dtype_there_and_back(tmp_path, dtype):
    _write(tmp_path / "model.safetensors", dtype)
    tensors = open_tensors(tmp_path)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == dtype
        assert file_of(tensors[name], tmp_path) == (tmp_path / "model.safetensors" if tensor.size else tmp_path)
        np.testing.assert_array_equal(tensors[name], tensor.astype(dtype))


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {"x": np.arange(7, dtype=ml_dtypes.bfloat16), "y": np.full((2, 2), 0.1, np.float16), "z": np.array([[1e-30]], np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, tensor in open_tensors(tmp_path).items():
        np.testing.assert_array_equal(tensor, tensors[name], strict=True)


def test_data_begins_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 9):
        path = tmp_path / f"{length}.safetensors"
        write_safetensors(path, {"n" * length: (1,)}, np.float32, [("n" * length, np.ones(1))])
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_single_file_is_preferred_to_an_index(tmp_path):
    """As transformers does, so that both load the same weights."""
    _write(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert open_tensors(tmp_path).keys() == TENSORS.keys()


def test_cut_off_file_names_the_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    _write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(WeightsError, match=r"model.safetensors is cut off: tensor 'c' ends at byte 48 of 45; download it again"):
        open_tensors(tmp_path)
    path.write_bytes(whole[:50])
    with pytest.raises(WeightsError, match=r"is cut off or no safetensors file .* it has 50 bytes, but says that its header alone has \d+"):
        open_tensors(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match="it has 0 bytes"):
        open_tensors(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://github.com/lfs/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(WeightsError, match="a Git LFS pointer"):
        open_tensors(tmp_path)


def test_damaged_headers(tmp_path):
    path = tmp_path / "model.safetensors"
    _with_header(path, "x", 0)
    path.write_bytes(path.read_bytes().replace(b'"x"', b"{x}"))
    with pytest.raises(WeightsError, match=r"model.safetensors has a damaged header \(.*\); download it again"):
        open_tensors(tmp_path)
    _with_header(path, {"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, 4)
    with pytest.raises(WeightsError, match="tensor 'w' has dtype F8_E4M3; supported: F32, F16, BF16, F64"):
        open_tensors(tmp_path)
    _with_header(path, {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8)
    with pytest.raises(WeightsError, match=r"tensor 'w' has 8 bytes, which is not shape \(3,\) of float32"):
        open_tensors(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nor model.safetensors.index.json; only safetensors weights can be loaded, so convert others"
    ):
        open_tensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"names 'model-00001-of-00002.safetensors', which is not in the folder"):
        open_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(WeightsError, match=r"index.json is not a safetensors index"):
        open_tensors(tmp_path)
    index.write_text("[]")
    with pytest.raises(WeightsError, match=r"index.json is not a safetensors index \(TypeError"):
        open_tensors(tmp_path)
    _write(tmp_path / "one.safetensors")
    index.write_text('{"weight_map": {"a": "one.safetensors", "q": "one.safetensors"}}')
    with pytest.raises(WeightsError, match=r"says that tensor 'q' is in 'one.safetensors', but it is not"):
        open_tensors(tmp_path)
