"""Commands that the documents print exist: scripts, subcommands, config files and overrides."""

import re
import shlex
from pathlib import Path

import pytest

from llamarl_jax.cli import COMMANDS
from llamarl_jax.config import Config
from llamarl_jax.config_files import load_config, override

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
_BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_STARTS = ("llamarl ", "python -m llamarl_jax ", "bash launch/")


def _commands() -> list[tuple[str, str]]:
    texts = [(path.name, "\n".join(_BLOCK.findall(path.read_text()))) for path in DOCUMENTS if path.exists()]
    texts += [(path.name, path.read_text().split('"""')[1]) for path in CONFIGS]
    found = []
    for name, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+", " ", line.strip().removeprefix("$ ").strip("`"))
            if command.startswith(_STARTS):
                found.append((name, command.partition(" #")[0].replace("python -m llamarl_jax", "llamarl")))
    return found


@pytest.mark.parametrize(("document", "command"), _commands())
def test_command_exists(document, command):
    words = shlex.split(command)
    for word in words:
        if word.startswith(("configs/", "launch/", "tests/", "notebooks/")):
            assert (ROOT / word.partition("::")[0]).exists(), f"{document}: {word} does not exist"
    if words[0] != "llamarl" or words[1].startswith("-"):
        return
    assert words[1] in COMMANDS, f"{document}: llamarl has no subcommand {words[1]}"
    if words[1] in ("train", "evaluate") and words[2:] and words[2].startswith("configs/") and "--help" not in words:
        override(load_config(ROOT / words[2], Config), words[3:])


def test_the_documents_show_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "bash launch/quickstart.sh" in readme
    assert "bash launch/test.sh" in readme


def test_relative_links_lead_somewhere():
    broken = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        if path.exists()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
        if "://" not in target and not target.startswith("mailto:") and not (ROOT / target).exists()
    ]
    assert not broken
