"""The whole loop once, quickly: what `launch/test.sh` also runs on the newest Python and JAX that are supported."""

import json
from pathlib import Path

import pytest

from llamarl_jax import controller
from llamarl_jax.config import Config
from llamarl_jax.config_files import load_config, override
from llamarl_jax.metrics.writer import read_metrics
from llamarl_jax.policy import open_policy

CONFIG = Path(__file__).parents[1] / "configs" / "tiny_digits_cpu.py"


@pytest.mark.parametrize("mode", ["boundary", "in_flight"])
def test_the_tiny_model_learns_from_random_weights(tmp_path, mode):
    config = override(load_config(CONFIG, Config), ["--run-dir", str(tmp_path / "run"), "--schedule.mode", mode])
    summary = controller.run(config)
    before, after = summary.evaluations
    assert (before.version, after.version) == (0, config.schedule.num_steps)
    assert before.accuracy < 0.1
    assert after.accuracy > before.accuracy + 0.1
    rows = [row for row in read_metrics(summary.run_dir) if "trainer/loss" in row]
    assert len(rows) == config.schedule.num_steps
    assert max(row["staleness/max"] for row in rows) == config.schedule.max_staleness
    assert summary.plot is not None
    assert summary.plot.stat().st_size > 10_000
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == "tiny"
    assert open_policy(str(summary.model_dir)).config.num_layers == 2
