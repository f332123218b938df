"""Remembers which prompts were drawn and not yet trained on, so that a resumed run neither skips nor repeats one.

A position alone is not enough: at a checkpoint some prompts are drawn but their groups are still being decoded, scored or waiting for a
batch. The cursor's state is therefore the next position *and* the prompts that are outstanding; after a resume those are drawn first.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from llamarl_jax.data.stream import PromptStream
from llamarl_jax.types import Prompt


class PromptCursor:
    """Hands out prompts in order; the generator draws, trainer and reward settle. Thread-safe."""

    def __init__(self, stream: PromptStream, state: dict[str, Any] | None = None) -> None:
        """Starts at position 0, or where a checkpoint's `state` left off."""
        self._stream = stream
        self._lock = threading.Lock()
        self._next_position = int(state["next_position"]) if state else 0
        self._replay = deque(int(i) for i in state["outstanding"]) if state else deque()
        self._outstanding: dict[int, int] = {}

    @property
    def num_skipped(self) -> int:
        """Prompts over the length limit so far."""
        return self._stream.num_skipped

    def draw(self, admission_index: int) -> Prompt:
        """Returns the next prompt and remembers it as outstanding under this group's admission index."""
        with self._lock:
            if self._replay:
                prompt = self._stream.prompt_at(self._replay.popleft())
                assert prompt is not None, "an outstanding prompt passed the length limit when it was first drawn"
            else:
                prompt, self._next_position = self._stream.next(self._next_position)
            self._outstanding[admission_index] = prompt.prompt_id
            return prompt

    def hold(self, admission_index: int, prompt_id: int) -> Prompt:
        """Returns a prompt that was drawn before a resume, and remembers it as outstanding; it is not drawn again."""
        with self._lock:
            prompt = self._stream.prompt_at(prompt_id)
            assert prompt is not None, "an outstanding prompt passed the length limit when it was first drawn"
            self._outstanding[admission_index] = prompt.prompt_id
            return prompt

    def undrawn(self) -> dict[str, Any]:
        """Returns the state without the prompts that are outstanding, for a checkpoint that keeps their groups."""
        with self._lock:
            return {"next_position": self._next_position, "outstanding": list(self._replay)}

    def settle(self, admission_index: int) -> None:
        """Marks a group as trained on or dropped."""
        with self._lock:
            del self._outstanding[admission_index]

    def state(self) -> dict[str, Any]:
        """Returns the position and the outstanding prompt ids, oldest first, as plain data for a checkpoint."""
        with self._lock:
            outstanding = [prompt_id for _, prompt_id in sorted(self._outstanding.items())]
            return {"next_position": self._next_position, "outstanding": [*outstanding, *self._replay]}
