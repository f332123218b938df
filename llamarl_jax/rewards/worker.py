"""A reward worker: reads pickled messages from standard input, answers on a private copy of standard output.

Run as `python -m llamarl_jax.rewards.worker`, a fresh process that shares nothing with its parent, neither JAX's threads nor an unguarded
`__main__`. It ends when its input does, so that it cannot outlive its parent. Whatever a reward function prints goes to standard error.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Sequence
from typing import BinaryIO

from llamarl_jax.rewards.api import RewardInput, RewardTerm

Verdict = dict[str, float] | tuple[str, str]
"""Value of each term, or (kind, message) of a failure."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers one pickled `RewardInput` after another; the first message holds the pickled terms."""
    terms: Sequence[RewardTerm] = pickle.load(requests)
    while True:
        try:
            sample = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(judge(terms, sample), answers)
        answers.flush()


def judge(terms: Sequence[RewardTerm], sample: RewardInput) -> Verdict:
    """Evaluates all terms; any exception becomes a failure of this sample only."""
    values: dict[str, float] = {}
    for term in terms:
        try:
            value = float(term.function(sample))
        except Exception as error:  # noqa: BLE001 - user code; the parent counts it and ends the run above a share
            return "exception", f"{term.name}: {type(error).__name__}: {error}"
        if not math.isfinite(value):
            return "bad value", f"{term.name} returned {value}"
        values[term.name] = value
    return values


def main() -> None:
    """Takes over the standard streams and serves until the parent closes them."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
