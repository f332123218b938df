"""One worker process and its two pipes, as its parent sees it.

The process is a fresh interpreter (neither forked nor `multiprocessing`'s spawn, which imports `__main__` again), so that a pool can be
started from a script without a guard, from a notebook, and from any thread. It has a session of its own: Ctrl-C in the terminal does not
reach it, and killing its group takes along what the reward function started.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

EXIT_PATIENCE_S = 5.0
"""A worker that closed its pipe is about to end; its status is waited for that long."""


class WorkerGoneError(Exception):
    """The process ended, or left half an answer."""


class WorkerProcess:
    """A worker; what it answers to is said in `llamarl_jax.rewards.worker`."""

    def __init__(self, setup: bytes) -> None:
        """Starts the process and sends the pickled `Setup`."""
        # -P keeps the current folder from shadowing standard modules; what the parent can import, the worker can.
        command = [sys.executable, "-P", "-m", "llamarl_jax.rewards.worker", str(os.getpid())]
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        # A reward function that imports JAX after all must not take the accelerator's memory.
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.send(setup)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when an answer comes or the process ends."""
        return self._answers.fileno()

    def send(self, message: bytes) -> None:
        """Hands over one message; that a worker died shows when its answer is read."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(message)
            self._requests.flush()

    def receive(self) -> Any:
        """Reads one answer.

        Raises:
            WorkerGoneError: there is none; the message tells how the process ended.
        """
        try:
            return pickle.load(self._answers)
        except (EOFError, pickle.UnpicklingError) as error:
            raise WorkerGoneError(self._how_it_ended()) from error

    def kill(self) -> None:
        """Kills the process and what it started, without waiting."""
        if self._answers.closed:  # its id may belong to another process by now
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills the process, waits for its end, and closes the pipes; again is harmless."""
        if self._answers.closed:
            return
        self.kill()
        self._process.wait()
        for stream in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "the worker closed its answers without ending"
        return f"the worker was killed by {signal.Signals(-status).name}" if status < 0 else f"the worker ended with exit status {status}"
