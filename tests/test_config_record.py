import enum
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llamarl_jax.config_record import Difference, differences, read_config_record, save_config, to_plain


class Mode(enum.StrEnum):
    FAST = "fast"


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.1
    mode: Mode = Mode.FAST


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    function: Callable[..., Any] | None = math.sqrt
    folder: Path = Path("runs")
    clip: float = math.inf
    terms: tuple[Inner, ...] = (Inner(),)
    extra: dict[str, Any] = field(default_factory=dict)


INNER = {"@class": f"{__name__}:Inner", "rate": 0.1, "mode": "fast"}


def test_a_config_becomes_plain_data():
    assert to_plain(Outer(extra={"kind": Inner, "half": functools.partial(pow, 2)})) == {
        "@class": f"{__name__}:Outer",
        "inner": INNER,
        "function": "math:sqrt",
        "folder": "runs",
        "clip": "inf",
        "terms": [INNER],
        "extra": {"kind": f"{__name__}:Inner", "half": {"@partial": "builtins:pow", "args": [2], "keywords": {}}},
    }


def test_what_has_no_plain_form_is_named():
    with pytest.raises(TypeError, match=r"config\.extra\.x holds .* which cannot be written down; use a frozen dataclass"):
        to_plain(Outer(extra={"x": object()}))


def test_a_record_is_saved_and_read(tmp_path):
    save_config(Outer(), tmp_path / "run")
    assert read_config_record(tmp_path / "run") == to_plain(Outer())
    assert json.loads((tmp_path / "run" / "config.json").read_text())["clip"] == "inf"


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the folder of a run; check the path"):
        read_config_record(tmp_path)


def test_equal_configs_do_not_differ():
    assert differences(to_plain(Outer(clip=math.nan)), to_plain(Outer(clip=math.nan))) == []


def test_differences_name_the_field():
    saved = to_plain(Outer())
    current = to_plain(Outer(inner=Inner(rate=0.2), function=math.exp, terms=(Inner(), Inner(rate=0.3))))
    found = differences(saved, current)
    assert found == [
        Difference("inner.rate", 0.1, 0.2),
        Difference("function", "math:sqrt", "math:exp"),
        Difference("terms.1", "(absent)", to_plain(Inner(rate=0.3))),
    ]
    assert str(found[0]) == "inner.rate: 0.1 -> 0.2"


def test_a_field_that_went_away_is_reported():
    saved = to_plain(Outer()) | {"old": 1}
    assert differences(saved, to_plain(Outer())) == [Difference("old", 1, "(absent)")]
