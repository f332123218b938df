"""Writes the newest checkpoint of a run as a Hugging Face folder (`llamarl export`); a run that ended has done so itself."""

from __future__ import annotations

from pathlib import Path

from llamarl_jax.checkpoint import Checkpointer
from llamarl_jax.config import Config
from llamarl_jax.meshes import build_meshes, configure_platform
from llamarl_jax.models.hf_export import export_model
from llamarl_jax.policy import open_policy
from llamarl_jax.train_step import TrainStep


def export_checkpoint(config: Config, output_dir: Path) -> Path:
    """Restores the newest checkpoint in the config's run folder and exports its policy; returns the folder written.

    Raises:
        FileExistsError: the output folder exists.
        CheckpointMissingError: the run has no checkpoint.
    """
    if output_dir.exists():
        raise FileExistsError(f"{output_dir} exists already; choose a folder that does not")
    configure_platform(config.placement)
    meshes = build_meshes(config.placement)
    policy = open_policy(config.model)
    train_step = TrainStep(
        policy.stacked,
        meshes.trainer,
        config.trainer,
        num_steps=config.schedule.num_steps,
        temperature=config.generator.temperature,
    )
    with Checkpointer(Path(config.run_dir), config.checkpoint) as checkpointer:
        restored = checkpointer.restore(train_step.abstract_state())
    export_model(output_dir, restored.state.params, policy.config, policy.folder)
    return output_dir
