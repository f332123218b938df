"""Runs the command line in this process."""

from typing import Any

import pytest

from llamarl_jax import cli


def run_to_exit(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    """Returns exit status, standard output and standard error of a command that ends by SystemExit."""
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err
