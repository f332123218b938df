import io
import math

import pytest
from rich.console import Console

from llamarl_jax.metrics import names
from llamarl_jax.metrics.console import LiveView, format_line, spark_line

METRICS = {
    names.REWARD_ALL: 0.4125,
    names.REWARD_TRAINED: 0.5,
    names.STALENESS_MEAN: 1.25,
    names.STALENESS_MAX: 2.0,
    names.GENERATED_TOKENS_PER_S: 12345.0,
    names.STEP_S: 4.0,
    **{name(executor): 1.0 for executor in ("generator", "trainer") for name in (names.busy_s, names.wait_s, names.unaccounted_s)},
}


def test_a_plain_line_per_step_without_a_terminal():
    out = io.StringIO()
    with LiveView(10, console=Console(file=out, width=60)) as view:
        view.status("compiling [not markup]")
        view.update(0, METRICS)
        view.update(1, {})
    assert out.getvalue().splitlines() == ["compiling [not markup]", format_line(0, 10, METRICS), "step 2/10"]


def test_the_line_holds_what_matters():
    assert format_line(0, 10, METRICS) == (
        "step 1/10 | reward 0.412 | trained on 0.500 | staleness 1.25 | oldest 2 | generated tok/s 12,345 | step s 4.00 | "
        "wait s: generator 1.00 trainer 1.00"
    )


@pytest.mark.parametrize("width", [1, 8, 20, 80, 200])
def test_a_terminal_of_any_width_is_drawn(width):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=24)
    with LiveView(3, console=console) as view:
        view.status("compiling")
        for step in range(3):
            view.update(step, METRICS | {names.REWARD_ALL: math.nan if step == 1 else 0.1 * step})
    if width >= 80:
        for text in ("3/3", "reward", "generator", "trainer", "unaccounted"):
            assert text in out.getvalue()


def test_a_terminal_view_can_be_switched_off():
    out = io.StringIO()
    with LiveView(10, is_live=False, console=Console(file=out, force_terminal=True, width=200)) as view:
        view.update(0, METRICS)
    assert out.getvalue().count("\n") == 1


def test_spark_line():
    assert spark_line([0.0, 0.5, 1.0]) == "▁▄█"
    assert spark_line([2.0, 2.0]) == "▁▁"
    assert spark_line([0.0, math.nan, 1.0]) == "▁ █"
    assert spark_line([math.nan]) == ""
    assert spark_line([]) == ""
