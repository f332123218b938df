"""A tiny model learns to repeat digits from random weights.

    llamarl train configs/tiny_digits_cpu.py

For tests, notebooks and bug reports: nothing is downloaded, and it runs anywhere.
"""

from llamarl_jax.config import Config, EvaluationConfig
from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.rewards.api import RewardConfig, RewardTerm
from llamarl_jax.rewards.exact import DigitShare
from llamarl_jax.schedule import ScheduleConfig
from llamarl_jax.train_step import OptimizerConfig, TrainerConfig


def get_config() -> Config:
    def prompts(split):
        return PromptsConfig(source=DigitPrompts(kind="copy", num_digits=2, split=split), template=PlainTemplate())

    return Config(
        run_dir="runs/tiny_digits",
        model="tiny",
        prompts=prompts("train"),
        evaluation=EvaluationConfig(prompts=prompts("eval"), num_prompts=25),
        rewards=RewardConfig(terms=(RewardTerm(name="digits", function=DigitShare()),)),
        schedule=ScheduleConfig(num_steps=120, groups_per_step=16, group_size=8, max_staleness=1),
        placement=PlacementConfig(platform="cpu"),
        engine=EngineConfig(num_slots=64, max_prompt_tokens=8, max_new_tokens=4, decode_steps_per_call=4),
        trainer=TrainerConfig(
            loss=AipoConfig(rho=4.0),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
            rows_per_microbatch=8,
            row_length=128,
        ),
    )
