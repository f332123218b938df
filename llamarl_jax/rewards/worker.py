"""A reward worker: reads pickled messages from standard input, answers on a private copy of standard output.

Run as `python -m llamarl_jax.rewards.worker PARENT_PID`, a fresh process that shares nothing with its parent, neither JAX's threads nor an
unguarded `__main__`. What a reward function prints goes to standard error, and it finds nothing to read on standard input.

A worker cannot outlive its parent. An idle one sees the end of its input. A busy one has a thread that looks for the parent; where the
reward function lets no thread run (a pathological regular expression holds the interpreter lock), the kernel ends it when its processor
time is used up.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamarl_jax.rewards.api import RewardInput, RewardTerm

Verdict = dict[str, float] | tuple[str, str]
"""Value of each term, or (kind, message) of a failure."""
READY = "ready"
MAX_MESSAGE_CHARACTERS = 1000
PARENT_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """First message to a worker.

    Attributes:
        terms: name and pickle of each term, apart, so that one that cannot be loaded can be named.
        timeout_s: wall-clock limit of one answer, which the parent keeps.
    """

    terms: tuple[tuple[str, bytes], ...]
    timeout_s: float


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Loads the terms, says `READY` or why not, then answers one pickled `RewardInput` after another."""
    setup: Setup = pickle.load(requests)
    terms = [_load_term(name, data) for name, data in setup.terms]
    problems = [term for term in terms if isinstance(term, str)]
    _answer(answers, problems[0] if problems else READY)
    loaded = [term for term in terms if isinstance(term, RewardTerm)]
    while not problems:
        try:
            sample = pickle.load(requests)
        except EOFError:
            return
        _limit_processor_time(setup.timeout_s)
        verdict = judge(loaded, sample)
        _limit_processor_time(0)
        _answer(answers, verdict)


def judge(terms: Sequence[RewardTerm], sample: RewardInput) -> Verdict:
    """Evaluates all terms; any exception becomes a failure of this sample only."""
    values: dict[str, float] = {}
    for term in terms:
        try:
            value = float(term.function(sample))
        except Exception as error:  # noqa: BLE001 - user code; the parent counts it and ends the run above a share
            return "exception", f"{term.name}: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
        if not math.isfinite(value):
            return "bad value", f"{term.name} returned {value}"
        values[term.name] = value
    return values


def main() -> None:
    """Takes over the standard streams and serves until the parent closes them or is gone."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    serve(requests, answers)


def _load_term(name: str, data: bytes) -> RewardTerm | str:
    try:
        term: RewardTerm = pickle.loads(data)
        getattr(term.function, "warm_up", lambda: None)()
    except Exception as error:  # noqa: BLE001 - importing user code may raise anything; the parent raises it with the term's name
        return f"reward term {name!r} cannot be loaded in a worker process: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
    return term


def _answer(answers: BinaryIO, message: Any) -> None:
    pickle.dump(message, answers)
    answers.flush()


def _limit_processor_time(timeout_s: float) -> None:
    """Asks the kernel for SIGPROF, which kills, beyond the processor time that all cores can spend in the limit; 0 takes it back."""
    signal.setitimer(signal.ITIMER_PROF, timeout_s * (os.cpu_count() or 1) + 1 if timeout_s else 0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    if os.getpgrp() == os.getpid():  # takes along what the reward function started; never the group of an interactive shell
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
