"""The tree keeps its shape: file names, no traces of one machine, tests that mirror the package, jax only where it may be."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("llamarl_jax", "configs", "launch", "tests", "notebooks", ".ci")
TEXT_SUFFIXES = {".py", ".gin", ".sh", ".md", ".toml", ".yaml", ".yml", ".ipynb", ".txt", ".json", ""}
VAGUE_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "base.py", "misc.py"}
ALLOWED_HOSTS = {
    "arxiv.org",
    "docs.jax.dev",
    "docs.pytest.org",
    "doi.org",
    "flax.readthedocs.io",
    "github.com",
    "huggingface.co",
    "joschu.net",
    "www.apache.org",
}
_MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:root|home|work|Users|opt|mnt|tmp)/[\w.]")
_HOST = re.compile(r"https?://([\w.-]+)")


def _files() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    top = [path for path in ROOT.iterdir() if path.is_file()]
    return [path for path in [*top, *inside] if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts]


def test_no_vague_file_names():
    assert [str(path.relative_to(ROOT)) for path in _files() if path.name in VAGUE_NAMES] == []


def test_no_traces_of_one_machine():
    found = []
    for path in _files():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            unknown = [host for host in _HOST.findall(line) if host not in ALLOWED_HOSTS]
            if _MACHINE_PATH.search(line) or unknown:
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "paths or hosts of one machine:\n" + "\n".join(found)


def test_locks_pin_by_hash_and_name_no_index():
    for path in (ROOT / "launch" / "locks").glob("*.txt"):
        text = path.read_text()
        assert "--index-url" not in text
        assert "--find-links" not in text
        pins = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
        assert pins
        assert all("--hash=sha256:" in pin for pin in pins)


def test_every_test_file_has_its_module():
    """A test folder or file names the module that it tests; a few test the whole instead."""
    whole = {"structure", "integration", "notebooks", "launch", "gpu"}
    orphans = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        relative = path.relative_to(ROOT / "tests")
        if len(relative.parts) > 1 and relative.parts[0] not in whole and not (ROOT / "llamarl_jax" / relative.parts[0]).is_dir():
            orphans.append(str(relative))
    assert not orphans


@pytest.mark.parametrize("module", ["llamarl_jax", "llamarl_jax.types", "llamarl_jax.rewards"])
def test_module_loads_without_jax(module):
    code = f"import sys, {module}; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
