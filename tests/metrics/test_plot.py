import numpy as np
import pytest
from matplotlib import image

from llamarl_jax.metrics import names
from llamarl_jax.metrics.plot import plot_run
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.metrics.writer import MetricsConfig, MetricsWriter


def _write(run_dir, rows):
    with MetricsWriter(run_dir, MetricsConfig()) as writer:
        for step, row in enumerate(rows):
            writer.write(step, row)


def _coloured_share(path):
    """Share of the pixels that are neither white, black nor grey."""
    pixels = image.imread(path)[..., :3]
    return float(np.mean(pixels.max(-1) - pixels.min(-1) > 0.2))


def _full_rows(timeline, now_s, num_steps=8):
    for step in range(num_steps):
        with timeline.span("generator", "decode"), timeline.wait("trainer", "batch"):
            now_s[0] += 1
        with timeline.span("trainer", "gradient"), timeline.span("a custom executor", "x"):
            now_s[0] += 2
        shares = {names.staleness_share(0): 0.25, names.staleness_share(1): 0.75}
        yield timeline.take_totals() | shares | {names.REWARD_ALL: step / 8, names.REWARD_TRAINED: step / 9, names.EVAL_ACCURACY: 0.5}


def test_the_picture_shows_the_run(tmp_path):
    now_s = [0.0]
    timeline = Timeline(clock=lambda: now_s[0])
    _write(tmp_path, _full_rows(timeline, now_s))
    timeline.save(tmp_path)
    path = plot_run(tmp_path)
    assert path == tmp_path / "run.png"
    assert _coloured_share(path) > 0.15


@pytest.mark.parametrize(
    "rows",
    [
        [{}],
        [{names.REWARD_ALL: float("nan")}],
        [{names.staleness_share(1): 1.0}, {names.staleness_share(3): 1.0}],
        [{names.REWARD_ALL: 0.5, names.STALENESS_MEAN: 0.0, names.STALENESS_MAX: 0.0}],
    ],
)
def test_a_short_or_odd_run_is_drawn(tmp_path, rows):
    _write(tmp_path, rows)
    assert plot_run(tmp_path).stat().st_size > 0


def test_only_waiting_is_drawn(tmp_path):
    now_s = [0.0]
    timeline = Timeline(clock=lambda: now_s[0])
    with timeline.wait("trainer", "batch"):
        now_s[0] += 1
    _write(tmp_path, [timeline.take_totals()])
    timeline.save(tmp_path)
    assert plot_run(tmp_path).stat().st_size > 0


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the folder of a run"):
        plot_run(tmp_path)
