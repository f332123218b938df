"""Reward functions that behave well or badly, by their sample; workers import this module by name."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from llamarl_jax.rewards.api import RewardInput


def length(sample: RewardInput) -> float:
    return float(len(sample.completion_text))


def length_if_even(sample: RewardInput) -> float:
    """Cannot judge answers to an odd reference."""
    if int(sample.reference or 0) % 2:
        raise ValueError("the reference is odd")
    return length(sample)


def by_text(sample: RewardInput) -> float:
    """Does what the completion says; otherwise returns its length."""
    match sample.completion_text:
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(600)
        case "hold the lock":  # no other thread runs, no signal handler in Python either
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit":
            os._exit(7)
        case "system exit":
            sys.exit(3)
        case "segfault":
            os.kill(os.getpid(), 11)
        case "raise":
            raise KeyError("no such column")
        case "nan":
            return float("nan")
        case "none":
            return None  # pyright: ignore[reportReturnType]
        case "print":
            print("noise on standard output", flush=True)
            os.write(1, b"\x80\x04 more noise")
        case "read":
            return float(len(sys.stdin.read()))
        case "child":
            subprocess.Popen(["sleep", "600"])
            while True:
                pass
        case "die later":
            threading.Timer(0.05, os._exit, [9]).start()
        case "pid":
            return float(os.getpid())
        case "jax":
            return float("jax" in sys.modules)
        case "numpy":
            return float("numpy" in sys.modules)
    return float(len(sample.completion_text))


@dataclass(frozen=True)
class SlowToStart:
    """Takes longer to get ready than an answer may take."""

    seconds: float

    def warm_up(self) -> None:
        time.sleep(self.seconds)

    def __call__(self, sample: RewardInput) -> float:
        return 1.0


@dataclass(frozen=True)
class BrokenStart:
    message: str

    def warm_up(self) -> None:
        raise ImportError(self.message)

    def __call__(self, sample: RewardInput) -> float:
        return 1.0


@dataclass(frozen=True)
class ExitsAtStart:
    def warm_up(self) -> None:
        os._exit(5)

    def __call__(self, sample: RewardInput) -> float:
        return 1.0
