"""SmolLM2-135M-Instruct learns arithmetic on two virtual CPU devices: the quickstart.

llamarl train configs/smollm2_arithmetic_cpu.py
"""

from llamarl_jax.config import Config, EvaluationConfig
from llamarl_jax.data.procedural import ArithmeticPrompts
from llamarl_jax.data.stream import PromptsConfig
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.rewards.api import RewardConfig, RewardTerm
from llamarl_jax.rewards.exact import ExactNumber
from llamarl_jax.schedule import ScheduleConfig
from llamarl_jax.train_step import OptimizerConfig, TrainerConfig


def get_config() -> Config:
    def prompts(split):
        source = ArithmeticPrompts(min_operand=0, max_operand=20, operators="+-", text="{a}{operator}{b}", split=split, eval_share=0.3)
        return PromptsConfig(source=source, template=PlainTemplate(text="3+5=8\n12+7=19\n9-2=7\n{question}="))

    return Config(
        run_dir="runs/smollm2_arithmetic",
        model="smollm2-135m",
        prompts=prompts("train"),
        evaluation=EvaluationConfig(prompts=prompts("eval"), num_prompts=265),
        rewards=RewardConfig(terms=(RewardTerm(name="correct", function=ExactNumber()),)),
        schedule=ScheduleConfig(num_steps=40, groups_per_step=32, group_size=8, max_staleness=1),
        placement=PlacementConfig(platform="cpu"),
        engine=EngineConfig(num_slots=64, max_prompt_tokens=32, max_new_tokens=6, decode_steps_per_call=2, stop_texts=("\n",)),
        trainer=TrainerConfig(
            loss=AipoConfig(rho=4.0),
            optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=3, schedule="linear"),
            rows_per_microbatch=1,
            row_length=256,
            leaves_out_zero_advantages=True,
        ),
    )
