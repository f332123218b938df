import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import cloudpickle
import pytest

from llamarl_jax.config_files import ConfigError, check_types, load_config, nearest, override, reachable_types


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The mesh."""

    fsdp: int = 1
    """Ways to split the parameters."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer."""

    learning_rate: float = 0.1
    """Step size of the optimizer."""
    kind: Literal["adam", "sgd"] = "adam"
    """Optimizer."""
    mesh: MeshConfig = MeshConfig()
    """Devices."""

    def __post_init__(self) -> None:
        if isinstance(self.learning_rate, float) and self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; choose a positive number")


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """The whole run."""

    seed: int = 0
    """Seed of everything random."""
    trainer: TrainerConfig = TrainerConfig()
    """Trainer."""
    rewards: tuple[Callable[..., float], ...] = ()
    """Reward functions."""
    other: MeshConfig | None = None
    """An optional part."""


HEADER = "from {module} import MeshConfig, RootConfig, TrainerConfig\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    # The config file imports these very classes under a name of its own.
    import sys

    monkeypatch.setitem(sys.modules, "classes_of_the_test", sys.modules[__name__])

    def write_file(text, name="run.py"):
        path = tmp_path / name
        path.write_text(HEADER.format(module="classes_of_the_test") + text if name.endswith(".py") else text)
        return path

    return write_file


def test_a_python_file_gives_its_config(write):
    path = write("def get_config(): return RootConfig(seed=3, trainer=TrainerConfig(learning_rate=1))")
    assert load_config(path, RootConfig) == RootConfig(seed=3, trainer=TrainerConfig(learning_rate=1))


def test_a_function_of_the_config_file_travels_to_another_process(write):
    path = write("def score(text): return 2.0 * len(text)\ndef get_config(): return RootConfig(rewards=(score,))")
    (score,) = load_config(path, RootConfig).rewards
    pickled = cloudpickle.dumps(score)
    import sys

    del sys.modules[score.__module__]
    assert pickle.loads(pickled)("ab") == 4.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"run\.py does not define get_config\(\); add `def get_config\(\) -> RootConfig:`"),
        ("def get_config(): return 3", r"run\.py returned int; return a RootConfig"),
        ("def get_config(:", r"run\.py, line 2: SyntaxError"),
        ("def get_config():\n  return undefined_name", r"run\.py, line 3: NameError: name 'undefined_name'"),
        ("def get_config(): return TrainerConfig(learning_rat=1)", r"line 2: TypeError: .*'learning_rat'; did you mean 'learning_rate'\?"),
        ("def get_config(): return TrainerConfig(learning_rate=-1.0)", r"line 2: ValueError: learning_rate is -1.0; choose a positive"),
        (
            "def get_config(): return RootConfig(trainer=TrainerConfig(learning_rate='x'))",
            r"run\.py: trainer\.learning_rate is 'x', but .*; expected float",
        ),
        (
            "def get_config(): return RootConfig(trainer=TrainerConfig(kind='adm'))",
            r"trainer\.kind is 'adm', but .*adam.*; expected Literal",
        ),
        ("def get_config(): return RootConfig(rewards=(1,))", r"rewards is \(1,\), but item 0 of tuple is not callable"),
    ],
)
def test_a_wrong_python_file_is_explained(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(text), RootConfig)


def test_a_missing_file_names_the_nearest_one(write, tmp_path):
    write("", "smollm2_arithmetic_cpu.py")
    with pytest.raises(FileNotFoundError, match=r"does not exist; did you mean 'smollm2_arithmetic_cpu\.py'\?"):
        load_config(tmp_path / "smollm2_arithmetik_cpu.py", RootConfig)
    with pytest.raises(FileNotFoundError, match=r"does not exist; .* has smollm2_arithmetic_cpu.py"):
        load_config(tmp_path / "x", RootConfig)


def test_a_missing_folder_points_at_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="nor does its folder nowhere; check the path"):
        load_config("nowhere/tiny.py", RootConfig)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").touch()
    with pytest.raises(FileNotFoundError, match=r"did you mean 'tiny.py'\?"):
        load_config("nowhere/tiny.py", RootConfig)


def test_an_unknown_suffix_is_refused(write):
    with pytest.raises(ConfigError, match=r"ends in '\.yaml'; give a \.py file with get_config\(\) or a \.gin file"):
        load_config(write("", "run.yaml"), RootConfig)


def test_overrides_reach_nested_fields():
    config = override(RootConfig(seed=5), ["--trainer.learning-rate", "1e-3", "--trainer.mesh.fsdp", "4", "--trainer.kind", "sgd"])
    assert config == RootConfig(seed=5, trainer=TrainerConfig(learning_rate=1e-3, kind="sgd", mesh=MeshConfig(fsdp=4)))


def test_a_functions_field_survives_overrides():
    config = RootConfig(rewards=(len,))
    assert override(config, ["--seed", "2"]).rewards == (len,)


def test_help_shows_docstrings_and_values(capsys):
    with pytest.raises(SystemExit) as stop:
        override(RootConfig(seed=77), ["--help"], prog="llamarl train x.py")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for text in ("Step size of the optimizer.", "--trainer.learning-rate", "(default: 77)", "llamarl train x.py"):
        assert text in out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [(["--trainer.learnin-rate", "1"], "--trainer.learning-rate"), (["--seed", "x"], "invalid"), (["--trainer.kind", "adm"], "adam")],
)
def test_a_wrong_override_is_explained(argv, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        override(RootConfig(), argv)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_whole_numbers_are_numbers():
    check_types(RootConfig(trainer=TrainerConfig(learning_rate=1)), "here")


def test_reachable_types_go_through_unions_and_containers():
    assert [cls for cls in reachable_types(RootConfig) if cls.__module__ == __name__] == [RootConfig, TrainerConfig, MeshConfig]


def test_nearest():
    assert nearest("trian", ["train", "fetch"]) == "; did you mean 'train'?"
    assert nearest("zzz", ["train", "fetch"]) == ""
