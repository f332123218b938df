"""Every shipped config loads, and a gin file equals the Python file of the same name."""

from pathlib import Path

import pytest

from llamarl_jax.config import Config
from llamarl_jax.config_files import load_config
from llamarl_jax.config_record import to_plain
from llamarl_jax.data.templates import PlainTemplate

FILES = sorted(path for path in (Path(__file__).parents[2] / "configs").iterdir() if path.suffix in (".py", ".gin"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_config_loads(path):
    if path.suffix == ".gin":
        pytest.importorskip("gin", reason="gin-config is not installed")
    config = load_config(path, Config)
    to_plain(config)  # can be written into the run folder


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".gin"], ids=lambda path: path.name)
def test_gin_equals_python(path):
    pytest.importorskip("gin", reason="gin-config is not installed")
    assert load_config(path, Config) == load_config(path.with_suffix(".py"), Config)


def test_one_of_each_kind_is_shipped():
    assert {path.suffix for path in FILES} == {".py", ".gin"}


@pytest.mark.parametrize("path", [path for path in FILES if path.name.startswith("smollm2_arithmetic")], ids=lambda path: path.name)
def test_the_solved_examples_of_a_prompt_are_not_held_out(path):
    config = load_config(path, Config)
    assert config.evaluation.prompts is not None
    assert isinstance(config.evaluation.prompts.template, PlainTemplate)
    source = config.evaluation.prompts.source.open()
    held_out = {source[i].question for i in range(len(source))}
    *examples, _ = config.evaluation.prompts.template.text.splitlines()
    assert len(held_out) >= 256
    assert examples
    assert not {example.split("=")[0] for example in examples} & held_out
