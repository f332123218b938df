import enum
import math
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from llamarl_jax.config_files import ConfigError, load_config

pytest.importorskip("gin", reason="gin-config is not installed")


class Mode(enum.StrEnum):
    BOUNDARY = "boundary"
    IN_FLIGHT = "in_flight"


def score(text: str) -> float:
    return float(len(text))


@dataclass(frozen=True, kw_only=True)
class GinMeshConfig:
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class GinTermConfig:
    function: Callable[..., float] = math.sqrt
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GinRootConfig:
    rate: float = 0.1
    mode: Mode = Mode.BOUNDARY
    trainer: GinMeshConfig = GinMeshConfig()
    generator: GinMeshConfig = GinMeshConfig()
    terms: tuple[GinTermConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}; choose a positive number")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__))

    def load_text(text):
        path = tmp_path / "run.gin"
        path.write_text(text)
        return load_config(path, GinRootConfig)

    return load_text


def test_an_empty_file_gives_the_defaults(load):
    assert load("") == GinRootConfig()


def test_bindings_reach_every_part(load):
    config = load(
        f"""
        GinRootConfig.rate = 3e-4
        GinRootConfig.mode = %Mode.IN_FLIGHT
        GinMeshConfig.tensor = 2            # both meshes
        trainer/GinMeshConfig.fsdp = 4      # the field `trainer` only
        GinRootConfig.terms = (@GinTermConfig(), @half/GinTermConfig())
        GinTermConfig.function = @{__name__}.score
        half/GinTermConfig.weight = 0.5
        """
    )
    assert config == GinRootConfig(
        rate=3e-4,
        mode=Mode.IN_FLIGHT,
        trainer=GinMeshConfig(fsdp=4, tensor=2),
        generator=GinMeshConfig(tensor=2),
        terms=(GinTermConfig(function=score), GinTermConfig(function=score, weight=0.5)),
    )
    assert type(config.trainer) is GinMeshConfig
    assert pickle.loads(pickle.dumps(config.terms[0].function)) is score


def test_a_file_leaves_nothing_behind(load):
    load("GinRootConfig.rate = 0.7\nRATE = 3")
    assert load("") == GinRootConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GinRootConfig.rat = 1", r"config file .*run\.gin: .* a parameter named 'rat'(.|\n)*; did you mean 'rate'\?"),
        ("GinRotConfig.rate = 1", r"No configurable matching 'GinRotConfig'(.|\n)*did you mean 'GinRootConfig'\?"),
        (
            "GinRootConfig.mode = %Mode.BOUNDRY",
            r"%Mode\.BOUNDRY is neither a macro of the file nor a constant; did you mean 'Mode\.BOUNDARY'",
        ),
        ("GinRootConfig.rate = -1", r"rate is -1; choose a positive number"),
        ("GinRootConfig.rate =", r"run\.gin: Unable to parse value"),
        ("GinRootConfig.mode = 'fast'", r"run\.gin: mode is 'fast', but .*; expected Mode"),
        ("GinTermConfig.function = @math.sqr", r"module 'math' has no 'sqr'; did you mean 'sqrt'\?"),
        ("GinTermConfig.function = @mahts.sqrt", r"@mahts\.sqrt names module 'mahts', which cannot be imported"),
    ],
)
def test_a_wrong_gin_file_is_explained(load, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_without_gin_the_fix_is_named(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "gin", None)
    with pytest.raises(ModuleNotFoundError, match=r"gin-config is not installed; run `pip install 'llamarl_jax\[gin\]'`"):
        load("")
