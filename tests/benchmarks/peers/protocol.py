"""The peers' side of `llamarl_jax.bench.peers`: one JSON line in, one JSON line out; whatever else is printed goes to standard error."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], int], dict[str, Any]]


def serve(start: Callable[[str, list[str]], tuple[str, Run]]) -> None:
    """Loads with `start(folder, arguments)`, which gives a version and the function that decodes a batch, and answers until input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output too

    def answer(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    try:
        version, run = start(sys.argv[1], sys.argv[2:])
        answer({"version": version})
        for line in sys.stdin:
            request = json.loads(line)
            answer(run(request["prompts"], request["new_tokens"]))
    except Exception as error:  # the reason for a missing row
        answer({"error": f"{type(error).__name__}: {error}"[:300]})
        raise


def num_cores() -> int:
    """Returns how many cores this process may use, as the benchmark counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
