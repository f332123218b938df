import dataclasses

import pytest

from llamarl_jax.executors.generator import GeneratorConfig
from llamarl_jax.losses.policy_gradient import ReinforceConfig
from tests.integration.tiny_run import tiny_config


def test_contradictions_name_both_sides_and_a_fix(tmp_path):
    base = tiny_config(tmp_path)
    with pytest.raises(ValueError, match=r"trainer.row_length = 10 cannot hold"):
        tiny_config(tmp_path, trainer={"row_length": 10})
    with pytest.raises(ValueError, match="ReinforceConfig does not correct for off-policy data"):
        tiny_config(tmp_path, trainer={"loss": ReinforceConfig()})
    tiny_config(tmp_path, trainer={"loss": ReinforceConfig()}, schedule={"max_staleness": 0})
    with pytest.raises(ValueError, match=r"schedule.group_size = 1: the advantage compares"):
        tiny_config(tmp_path, schedule={"group_size": 1})
    with pytest.raises(ValueError, match=r"trainer.rows_per_microbatch = 4 cannot be split"):
        tiny_config(tmp_path, placement={"trainer_fsdp": 3})
    with pytest.raises(ValueError, match=r"engine.num_slots = 8 cannot be split"):
        tiny_config(tmp_path, placement={"generator_data": 3})
    with pytest.raises(ValueError, match=r"engine.slots_per_prompt = 8 leaves slots .* schedule.group_size = 4 completions"):
        tiny_config(tmp_path, engine={"slots_per_prompt": 8})
    with pytest.raises(ValueError, match=r"generator.temperature is 0"):
        GeneratorConfig(temperature=0)
    assert base.row_length == 32
    assert dataclasses.replace(base, trainer=dataclasses.replace(base.trainer, row_length=0)).row_length == 14
