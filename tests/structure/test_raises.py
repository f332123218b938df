"""The check of `launch/test.sh` that every raise is executed finds those that are not."""

import os
import subprocess
import sys
import tomllib

import pytest

from tests.structure import raises

ERRORS = """


def in_main(x):
    if x > 1:
        raise ValueError(
            f"{x} is too much; "
            "choose 1"
        )


def in_thread():
    raise ValueError("in a thread")


def in_process():
    raise ValueError("in a process")


def never():
    raise ValueError(f"{never} is not called")


def again():
    try:
        in_main(2)
    except ValueError:
        raise
    except TypeError:
        raise
"""

SUITE = """
import contextlib
import subprocess
import sys
import threading

from measured import errors

def quietly(function):
    with contextlib.suppress(ValueError):
        function()

quietly(errors.again)
thread = threading.Thread(target=quietly, args=[errors.in_thread])
thread.start()
thread.join()
subprocess.run([sys.executable, "-c", "from measured import errors; errors.in_process()"], stderr=subprocess.DEVNULL)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with a package and the combined data of a program that runs part of it, measured with this project's options."""
    folder = tmp_path_factory.mktemp("measured")
    options = tomllib.loads((raises.ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]
    assert raises.ROOT / options["data_file"] == raises.DATA_FILE
    options["source_pkgs"] = ["measured"]
    (folder / ".coveragerc").write_text("[run]\n" + "".join(f"{name} = {_option(value)}\n" for name, value in options.items()))
    (folder / "suite.py").write_text(SUITE)
    (folder / "measured").mkdir()
    for name, source in {"__init__.py": "", "errors.py": ERRORS, "unused.py": "def f():\n    raise KeyError\n"}.items():
        (folder / "measured" / name).write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}  # this suite's own measurement
    for arguments in (["run", "suite.py"], ["combine", "--quiet"]):
        subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=folder, env=environment, check=True)
    return folder / "measured", folder / options["data_file"]


def _option(value):
    return ",".join(value) if isinstance(value, list) else value


def test_raises_that_nothing_executes_are_listed(measured):
    package, data_file = measured
    missing = raises.unexecuted(package, raises.read_lines(data_file))
    lines = ERRORS.splitlines()
    assert missing == [
        f"measured/errors.py:{lines.index('def never():') + 2}: raise ValueError(f'{{never}} is not called')",
        f"measured/errors.py:{len(lines)}: raise",
        "measured/unused.py:2: raise KeyError",
    ]


def test_the_package_has_raises_to_check():
    """Guards against a checker that looks at nothing: without data, every raise is missing."""
    missing = raises.unexecuted(raises.ROOT / "llamarl_jax", {})
    assert len(missing) > 150
    assert any(line.startswith("llamarl_jax/losses/kl.py:") and "kl.coefficient" in line for line in missing)


def test_missing_data_are_an_error_and_not_a_pass(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `coverage run -m pytest` and `coverage combine` before"):
        raises.read_lines(tmp_path / "data")
