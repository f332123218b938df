"""A pool of worker processes with a hard deadline for each answer.

A reward function may loop, crash or eat memory on what a model wrote. It therefore runs in a fresh process (`llamarl_jax.rewards.worker`), which
is killed, not asked, when an answer takes too long, and replaced. What fails is excluded and counted, never scored 0; when failures exceed
a share, the run ends with their reasons.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle

from llamarl_jax.rewards.api import RewardConfig, RewardInput


@dataclass(frozen=True)
class Failure:
    """Why a completion has no score: `timeout`, `crash`, `exception` or `bad value`."""

    kind: str
    message: str


class RewardFailureError(RuntimeError):
    """Too many completions could not be scored."""


class RewardPool:
    """Scores completions in worker processes; a context manager. Several threads may call `score`."""

    def __init__(self, config: RewardConfig) -> None:
        """Pickles the terms and starts the workers.

        Raises:
            ValueError: a term cannot be pickled.
        """
        self._config = config
        self._terms = _pickle_terms(config)
        self._lock = threading.Lock()
        self._workers = [_Worker(self._terms) for _ in range(config.num_workers)]
        self._num_scored = 0
        self.failures: Counter[str] = Counter()
        self._last_message = ""

    def score(self, samples: Sequence[RewardInput]) -> list[dict[str, float] | Failure]:
        """Returns each sample's value of every term, or its failure, in order.

        Raises:
            RewardFailureError: failures exceed `max_failure_share`.
        """
        results: list[dict[str, float] | Failure | None] = [None] * len(samples)
        with self._lock:
            pending = list(range(len(samples)))[::-1]
            busy: dict[int, tuple[int, float]] = {}  # worker → (sample, deadline)
            while pending or busy:
                for number, worker in enumerate(self._workers):
                    if number not in busy and pending:
                        index = pending.pop()
                        worker.send(samples[index])
                        busy[number] = (index, time.monotonic() + self._config.timeout_s)
                for number in self._wait(busy):
                    index, _ = busy.pop(number)
                    results[index] = self._collect(number)
                for number, (index, deadline_s) in list(busy.items()):
                    if time.monotonic() > deadline_s:
                        del busy[number]
                        self._replace(number)
                        results[index] = Failure("timeout", f"no answer within {self._config.timeout_s} s")
            done = [result for result in results if result is not None]
            self._count(done)
        return done

    def close(self) -> None:
        """Kills the workers and waits for them."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, busy: dict[int, tuple[int, float]]) -> list[int]:
        """Returns the busy workers that have something to read, waiting until the next deadline at most."""
        if not busy:
            return []
        streams = {self._workers[number].fileno(): number for number in busy}
        patience_s = max(0.0, min(deadline_s for _, deadline_s in busy.values()) - time.monotonic())
        readable, _, _ = select.select(list(streams), [], [], patience_s)
        return [streams[stream] for stream in readable]

    def _collect(self, number: int) -> dict[str, float] | Failure:
        try:
            verdict = self._workers[number].receive()
        except (EOFError, pickle.UnpicklingError):
            status = self._replace(number)
            return Failure("crash", f"the worker ended with status {status}")
        return verdict if isinstance(verdict, dict) else Failure(*verdict)

    def _replace(self, number: int) -> int | None:
        status = self._workers[number].stop()
        self._workers[number] = _Worker(self._terms)
        return status

    def _count(self, results: Sequence[dict[str, float] | Failure]) -> None:
        self._num_scored += len(results)
        for result in results:
            if isinstance(result, Failure):
                self.failures[result.kind] += 1
                self._last_message = result.message
        total = sum(self.failures.values())
        if total >= self._config.min_failures and total > self._config.max_failure_share * self._num_scored:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in self.failures.most_common())
            raise RewardFailureError(
                f"{total} of {self._num_scored} completions could not be scored ({kinds}; last: {self._last_message}), more than "
                f"rewards.max_failure_share = {self._config.max_failure_share}; mend the reward function or raise the share"
            )


class _Worker:
    """One process and its two pipes."""

    def __init__(self, terms: bytes) -> None:
        command = [sys.executable, "-m", "llamarl_jax.rewards.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._write(terms)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when an answer comes or the process ends."""
        return self._answers.fileno()

    def send(self, sample: RewardInput) -> None:
        """Hands over one sample; a worker that died shows when its answer is read."""
        self._write(cloudpickle.dumps(sample))

    def receive(self) -> dict[str, float] | tuple[str, str]:
        """Reads one answer."""
        return pickle.load(self._answers)

    def stop(self) -> int | None:
        """Kills the process and what it started, reaps it, and returns its status."""
        status = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(data)
            self._requests.flush()


def _pickle_terms(config: RewardConfig) -> bytes:
    for term in config.terms:
        try:
            cloudpickle.dumps(term)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"reward term {term.name!r} cannot be sent to a worker process ({error}); define its function at the top level of a module, or "
                "as a frozen dataclass with __call__ that holds only plain values"
            ) from error
    return cloudpickle.dumps(config.terms)
