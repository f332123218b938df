"""A pool of worker processes with a hard deadline for each answer.

A reward function may loop, crash or eat memory on what a model wrote. It therefore runs in another process, which is killed, not asked,
when an answer takes too long, and replaced. What fails is excluded and counted, never scored 0; when failures exceed a share, the run ends
with their reasons. The deadline covers an answer alone: a worker first starts, imports what the terms need, and says that it is ready.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal, cast

import cloudpickle

from llamarl_jax.rewards.api import RewardConfig, RewardInput
from llamarl_jax.rewards.process import WorkerGoneError, WorkerProcess
from llamarl_jax.rewards.worker import READY, Setup


@dataclass(frozen=True)
class Failure:
    """Why a completion has no score: `timeout`, `crash`, `exception` or `bad value`."""

    kind: str
    message: str


class RewardFailureError(RuntimeError):
    """Too many completions could not be scored."""


class RewardWorkerError(RuntimeError):
    """A worker cannot be started, or the pool is closed."""


Result = dict[str, float] | Failure
"""Value of each term before weighting, or why there is none."""


@dataclass
class _Seat:
    """A worker's place in the pool, and what it is doing until when; `sample` is the index of what it scores."""

    process: WorkerProcess
    doing: Literal["starting", "waiting", "scoring"]
    deadline_s: float
    sample: int = -1


class RewardPool:
    """Scores completions in worker processes; a context manager. Any thread may call `score`; calls take turns."""

    def __init__(self, config: RewardConfig) -> None:
        """Pickles the terms, starts the workers, and waits until they have loaded what they need.

        Raises:
            ValueError: a term cannot be pickled.
            RewardWorkerError: a worker cannot load a term, or does not start in time.
        """
        self._config = config
        self._setup = pickle.dumps(Setup(terms=_pickle_terms(config), timeout_s=config.timeout_s))
        self._turn = threading.RLock()
        self._spawning = threading.Lock()
        self._is_closed = False
        self._seats: list[_Seat] = []
        self._num_scored = 0
        self.failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        try:
            for _ in range(config.num_workers):
                self._seats.append(self._new_seat())
            while any(seat.doing == "starting" for seat in self._seats):
                self._take_in([None])
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return [seat.process.pid for seat in self._seats]

    def score(self, samples: Sequence[RewardInput]) -> list[Result]:
        """Returns each sample's value of every term, or its failure, in order.

        Raises:
            RewardFailureError: failures exceed `max_failure_share`.
            RewardWorkerError: a replaced worker does not start again, or the pool was closed.
        """
        messages = [_pickle_sample(sample) for sample in samples]
        results: list[Result | None] = [message if isinstance(message, Failure) else None for message in messages]
        pending = deque(index for index, result in enumerate(results) if result is None)
        with self._turn:
            try:
                self._hand_out(pending, messages)
                while pending or any(seat.doing == "scoring" for seat in self._seats):
                    self._take_in(results)
                    self._hand_out(pending, messages)
            except BaseException:
                self.close()  # half-done answers must not meet the next call
                raise
            done = [result for result in results if result is not None]
            self._count(done)
        return done

    def close(self) -> None:
        """Kills the workers and waits for their end; a `score` that is under way in another thread ends with an error."""
        with self._spawning:
            self._is_closed = True
            for seat in self._seats:
                seat.process.kill()
        with self._turn:
            for seat in self._seats:
                seat.process.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _hand_out(self, pending: deque[int], messages: Sequence[bytes | Failure]) -> None:
        """Gives each waiting worker a sample."""
        if self._is_closed:
            raise RewardWorkerError("the reward pool is closed; score inside its `with` block")
        for number, seat in enumerate(self._seats):
            if not pending or seat.doing != "waiting":
                continue
            if not seat.process.is_alive:  # what an earlier function left behind ended it; the next sample is innocent
                self._replace(number)
                continue
            seat.sample = pending.popleft()
            seat.doing, seat.deadline_s = "scoring", time.monotonic() + self._config.timeout_s
            seat.process.send(cast(bytes, messages[seat.sample]))

    def _take_in(self, results: list[Result | None]) -> None:
        """Waits for an answer or a deadline and moves every worker on that has met either."""
        patience_s = max(0.0, min(seat.deadline_s for seat in self._seats) - time.monotonic())
        processes = [seat.process for seat in self._seats]
        readable = set(wait(cast(Any, processes), None if math.isinf(patience_s) else patience_s))
        for number, seat in enumerate(self._seats):
            if seat.process not in readable and time.monotonic() < seat.deadline_s:
                continue
            is_late = seat.process not in readable
            if seat.doing == "starting":
                self._finish_start(seat, is_late)
            else:
                result = self._late() if is_late else _receive(seat.process)
                if seat.doing == "scoring":
                    results[seat.sample] = result
                if isinstance(result, Failure) and result.kind in {"timeout", "crash"}:
                    self._replace(number)
                else:
                    seat.doing, seat.deadline_s = "waiting", math.inf

    def _late(self) -> Failure:
        return Failure("timeout", f"no answer within {self._config.timeout_s} s")

    def _finish_start(self, seat: _Seat, is_late: bool) -> None:
        if is_late:
            raise RewardWorkerError(
                f"a reward worker did not start within rewards.start_timeout_s = {self._config.start_timeout_s} s; raise it, or make the "
                "imports of the reward functions faster"
            )
        try:
            answer = seat.process.receive()
        except WorkerGoneError as error:
            raise RewardWorkerError(f"a reward worker ended while it was starting ({error}); its standard error tells more") from error
        if answer != READY:
            raise RewardWorkerError(f"{answer}; make its module importable without the main program, and install what it needs")
        seat.doing, seat.deadline_s = "waiting", math.inf

    def _replace(self, number: int) -> None:
        self._seats[number].process.close()
        self._seats[number] = self._new_seat()

    def _new_seat(self) -> _Seat:
        with self._spawning:
            if self._is_closed:
                raise RewardWorkerError("the reward pool was closed while it was scoring")
            return _Seat(WorkerProcess(self._setup), "starting", time.monotonic() + self._config.start_timeout_s)

    def _count(self, results: Sequence[Result]) -> None:
        self._num_scored += len(results)
        for result in results:
            if isinstance(result, Failure):
                self.failures[result.kind] += 1
                self._examples[result.kind] = result.message
        total = sum(self.failures.values())
        if total >= self._config.min_failures and total > self._config.max_failure_share * self._num_scored:
            kinds = "; ".join(f"{count} × {kind}, such as: {self._examples[kind]}" for kind, count in self.failures.most_common())
            raise RewardFailureError(
                f"{total} of {self._num_scored} completions could not be scored ({kinds}), more than rewards.max_failure_share = "
                f"{self._config.max_failure_share}; mend the reward function or raise the share"
            )


def _receive(process: WorkerProcess) -> Result:
    try:
        verdict = process.receive()
    except WorkerGoneError as error:
        return Failure("crash", str(error))
    return verdict if isinstance(verdict, dict) else Failure(*verdict)


def _pickle_sample(sample: RewardInput) -> bytes | Failure:
    try:
        return cloudpickle.dumps(sample)
    except Exception as error:  # noqa: BLE001 - metadata of any kind; counted like an exception of the reward function
        return Failure("exception", f"a sample's metadata cannot be pickled: {type(error).__name__}: {error}")


def _pickle_terms(config: RewardConfig) -> tuple[tuple[str, bytes], ...]:
    pickles = []
    for term in config.terms:
        try:
            pickles.append((term.name, cloudpickle.dumps(term)))
        except Exception as error:  # a user's object may raise anything here
            raise ValueError(
                f"reward term {term.name!r} cannot be sent to a worker process ({type(error).__name__}: {error}); define its function at "
                "the top level of a module, or as a frozen dataclass with __call__ that holds only plain values"
            ) from error
    return tuple(pickles)
