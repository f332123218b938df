"""The config of a run: one frozen dataclass that holds each component's own config, and the checks that span components.

A config file builds one (`configs/*.py`, `configs/*.gin`), the command line overrides single fields, and the resolved result is written
into the run folder and into every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl_jax.checkpoint import CheckpointConfig
from llamarl_jax.data.stream import PromptsConfig
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.executors.generator import GeneratorConfig
from llamarl_jax.losses.advantages import AdvantageConfig
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.metrics.watchdog import WatchdogConfig
from llamarl_jax.metrics.writer import MetricsConfig
from llamarl_jax.rewards.api import RewardConfig
from llamarl_jax.schedule import ScheduleConfig
from llamarl_jax.train_step import TrainerConfig
from llamarl_jax.weights.export import WeightsConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out problems that are answered greedily before and after training."""

    prompts: PromptsConfig | None = None
    """Where the problems come from; None evaluates nothing."""
    num_prompts: int = 256
    """How many problems, from the start of the source."""
    num_samples_kept: int = 20
    """How many answers are written to the run folder to read."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One reinforcement-learning run."""

    run_dir: str = "runs/default"
    """Folder for metrics, checkpoints, pictures and the final model."""
    seed: int = 0
    """Start of all random numbers: prompt order and sampling."""
    should_resume: bool = False
    """Go on from the newest checkpoint in run_dir."""
    model: str = "smollm2-135m"
    """Start policy: a name known to `llamarl fetch`, a Hub id, or a local Hugging Face folder."""
    prompts: PromptsConfig
    """Training prompts."""
    rewards: RewardConfig
    """How completions are scored."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How rewards of a group become advantages."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Steps, batch size and the staleness bound."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which devices train and which generate."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Sampling."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Shape of the decoder."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """How weights travel."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Loss and optimizer."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Measurement on held-out problems."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Where numbers go."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """When a run without progress is ended."""

    def __post_init__(self) -> None:
        check_config(self)

    @property
    def row_length(self) -> int:
        """Tokens of a training row."""
        return self.trainer.row_length or self.engine.max_prompt_tokens + self.engine.max_new_tokens


def check_config(config: Config) -> None:
    """Checks what spans several components.

    Raises:
        ValueError: fields contradict each other; the message names them and a fix.
    """
    longest = config.engine.max_prompt_tokens + config.engine.max_new_tokens
    if config.row_length < longest:
        raise ValueError(
            f"trainer.row_length = {config.row_length} cannot hold engine.max_prompt_tokens + engine.max_new_tokens = {longest} tokens; "
            "raise it, or set it to 0"
        )
    if config.schedule.max_staleness > 0 and not config.trainer.loss.is_off_policy_safe:
        raise ValueError(
            f"{type(config.trainer.loss).__name__} does not correct for off-policy data, but schedule.max_staleness = "
            f"{config.schedule.max_staleness}; choose AipoConfig, or set schedule.max_staleness to 0"
        )
    if config.schedule.group_size < 2:
        raise ValueError(
            f"schedule.group_size = {config.schedule.group_size}: the advantage compares completions of one prompt; choose at least 2"
        )
    num_rows = config.placement.trainer_data * config.placement.trainer_fsdp
    if config.trainer.rows_per_microbatch % num_rows:
        raise ValueError(
            f"trainer.rows_per_microbatch = {config.trainer.rows_per_microbatch} cannot be split over trainer_data × trainer_fsdp = "
            f"{num_rows} devices; choose a multiple of {num_rows}"
        )
    if config.engine.num_slots != "auto" and config.engine.num_slots % config.placement.generator_data:
        raise ValueError(
            f"engine.num_slots = {config.engine.num_slots} cannot be split over generator_data = {config.placement.generator_data} "
            f"replicas; choose a multiple of {config.placement.generator_data}"
        )
    if config.engine.slots_per_prompt > config.schedule.group_size:
        raise ValueError(
            f"engine.slots_per_prompt = {config.engine.slots_per_prompt} leaves slots that nothing can fill, because a prompt has only "
            f"schedule.group_size = {config.schedule.group_size} completions; choose a quarter of that, or 1"
        )
