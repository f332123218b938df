"""Runs other libraries on the same prompts: each in a process and a virtual environment of its own, which stays loaded between runs.

A peer is a script of `tests/benchmarks/peers` that is started with the model folder. It answers with one JSON line when it is ready
({"version": …}) and then one for each line it is sent:

    {"prompts": [[id, …], …], "new_tokens": N}  →  {"total_s": …, "prefill_s": …, "decode_steps": …, "step_s": …, "token_ids": [[id, …], …]}

or {"error": "…"}. What it writes to standard error is shown only if it dies.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llamarl_jax.bench.sample import Sample, TokenIds

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "benchmarks" / "peers"
ENVIRONMENTS = ROOT / ".venv-peers"
TIMEOUT_S = 900.0
SETUP = "bash tests/benchmarks/peers/setup.sh"


class PeerError(ValueError):
    """A peer is not installed, died, or cannot do the work; the message is the reason why its row is missing."""


@dataclass(frozen=True)
class PeerSpec:
    """A peer: its name in tables, its folder under `.venv-peers`, its script and the arguments behind the model folder."""

    name: str
    environment: str
    script: str
    arguments: tuple[str, ...] = ()


PEERS = (
    PeerSpec("transformers", "transformers", "run_transformers.py"),
    PeerSpec("Tunix", "tunix", "run_tunix.py"),
    PeerSpec("llama.cpp F32", "llama_cpp", "run_llama_cpp.py", ("f32",)),
    PeerSpec("llama.cpp Q4_1", "llama_cpp", "run_llama_cpp.py", ("q4_1",)),
)


class Peer:
    """A running peer process; a context manager."""

    def __init__(self, spec: PeerSpec, folder: Path) -> None:
        """Starts the process and waits until it has loaded the model.

        Raises:
            PeerError: it is not installed or does not start.
        """
        self.name = spec.name
        python, script = ENVIRONMENTS / spec.environment / "bin" / "python", SCRIPTS / spec.script
        if not python.exists() or not script.exists():
            raise PeerError(f"not installed; run {SETUP} in a checkout of the repository")
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [str(python), str(script), str(folder), *spec.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.pid = self._process.pid
        try:
            self.version = str(self._read()["version"])
        except PeerError:
            self.close()
            raise

    def run(self, prompts: TokenIds, new_tokens: int) -> Sample:
        """Lets the peer decode the prompts.

        Raises:
            PeerError: it cannot, or it died.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"the process has ended ({self._last_words()})") from None
        return Sample(**self._read())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(TIMEOUT_S, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise PeerError(f"the process has ended or did not answer within {TIMEOUT_S:.0f} s ({self._last_words()})")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it wrote no error"


def open_peers(folder: Path, stack: contextlib.ExitStack) -> tuple[list[Peer], dict[str, str]]:
    """Starts all peers; returns those that run, and the reasons of the others by name.

    Args:
        folder: Hugging Face folder of the model.
        stack: ends the processes.
    """
    peers, left_out = [], {}
    for spec in PEERS:
        try:
            peer = Peer(spec, folder)
        except PeerError as error:
            left_out[spec.name] = str(error)
            continue
        stack.callback(peer.close)
        peers.append(peer)
    return peers, left_out
