"""SmolLM2-135M itself, on one device for each role and on four: real weights through the same loop as the tiny model."""

import dataclasses
from pathlib import Path

import pytest

from llamarl_jax.config import Config, EvaluationConfig
from llamarl_jax.config_files import load_config
from llamarl_jax.fetch import fetch
from llamarl_jax.meshes import PlacementConfig
from tests.integration.tiny_run import run

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2_arithmetic_cpu.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        PlacementConfig(platform="cpu"),
        PlacementConfig(platform="cpu", trainer_fsdp=4, generator_data=2, generator_tensor=2),
    ],
    ids=["1+1", "4+4"],
)
def test_smollm2_trains_on_every_pair_of_meshes(tmp_path, placement):
    fetch("smollm2-135m")
    shipped = load_config(CONFIG, Config)
    record = run(
        dataclasses.replace(
            shipped,
            run_dir=str(tmp_path),
            evaluation=EvaluationConfig(prompts=None),
            schedule=dataclasses.replace(shipped.schedule, num_steps=2, groups_per_step=4, group_size=4, max_staleness=0),
            placement=placement,
            engine=dataclasses.replace(shipped.engine, num_slots=16),
            trainer=dataclasses.replace(shipped.trainer, rows_per_microbatch=4, row_length=64, leaves_out_zero_advantages=False),
            weights=dataclasses.replace(shipped.weights, verify="always"),
            metrics=dataclasses.replace(shipped.metrics, use_live_view=False, write_plot=False),
        )
    )
    assert len(record.rows) == 2
    for row in record.rows:
        assert row["mismatch/equal_version_logprob_abs_mean"] < 1e-5
        assert row["sync/is_verified"] == 1
    assert any(row["trainer/grad_norm"] > 0 for row in record.rows)
