"""Asynchronous checkpoints of a run: trainer state, committed step, prompt cursor and resolved config.

Orbax copies device memory before `save` returns and writes in the background, so the next step may donate the state at once. A save that
failed in the background is raised by the next save or by `close`, never swallowed. Each checkpoint is written under a temporary name and
renamed, so a kill leaves either a whole checkpoint or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

FOLDER_NAME = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every_steps: int = 0
    """Steps between checkpoints; 0 writes none. With `schedule.partial_rollout_rounds` each computes KV caches again, in the run too."""
    num_kept: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.num_kept < 1:
            raise ValueError(
                f"checkpoint.every_steps = {self.every_steps} must be 0 or more, checkpoint.num_kept = {self.num_kept} at least 1"
            )


class CheckpointMissingError(FileNotFoundError):
    """A resume was asked for and there is nothing to resume from."""


@dataclass(frozen=True)
class Restored:
    """One checkpoint: device state, and plain data (cursor, config)."""

    step: int
    state: Any
    host: dict[str, Any]


class Checkpointer:
    """Writes and reads the checkpoints of one run folder; use as a context manager or call `close`."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self._folder = run_dir.absolute() / FOLDER_NAME
        self._config = config
        options = ocp.CheckpointManagerOptions(max_to_keep=config.num_kept, enable_async_checkpointing=True, create=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def is_due(self, step: int) -> bool:
        """Says whether the state after `step` committed steps is to be saved."""
        return bool(self._config.every_steps) and step % self._config.every_steps == 0

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts writing a checkpoint; returns once the device memory is copied."""
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)))

    def latest_step(self) -> int | None:
        """Returns the newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def restore(self, abstract_state: Any) -> Restored:
        """Reads the newest checkpoint straight into the shardings of `abstract_state`.

        Raises:
            CheckpointMissingError: there is no checkpoint.
        """
        step = self.latest_step()
        if step is None:
            raise CheckpointMissingError(
                f"no checkpoint in {self._folder}; start the run without resume, or name the folder of the run to go on with"
            )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), host=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        return Restored(step, restored["state"], restored["host"])

    def close(self) -> None:
        """Waits for the last write and raises if it failed."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the last checkpoint was not written either: {failed!r}")  # the first error is the run's
