"""What sharing prompts costs and saves when completions end as they like: groups of a real task through the scheduler and the engine.

    python -m tests.benchmarks.shared_prompts --problems gsm8k_test.jsonl

Every prompt holds three solved problems and one that is not; a completion ends at an empty line. For each value of
`engine.slots_per_prompt` the same groups are sampled to the end, in random order and several times, after one round that compiles. Printed
are kept tokens per second of the whole run, prefill included, and the share of slot steps that gave a kept token: it falls where slots wait
for a free prompt row.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.evaluate import open_decoder
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.policy import Policy, open_policy
from llamarl_jax.types import Prompt

NUM_SHOTS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is sampled, and how often."""

    problems: Path
    """JSON lines with `question` and `answer`, such as GSM8K's."""
    model: str = "smollm2-135m"
    """As for `llamarl fetch`."""
    num_groups: int = 24
    """Prompts."""
    group_size: int = 8
    """Completions of each prompt."""
    num_slots: int = 64
    """Completions decoded at once."""
    max_new_tokens: int = 192
    """Longest completion."""
    slots_per_prompt: tuple[int, ...] = (1, 2, 4)
    """Values to compare."""
    kernels: Literal["auto", "xla", "native", "pallas"] = "auto"
    """As `engine.kernels`."""
    repeats: int = 3
    """Timed runs of each value."""


def main(options: Options) -> None:
    """Measures and prints a table."""
    policy = open_policy(options.model)
    prompts = make_prompts(policy, options)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {options}")
    schedulers = {n: open_scheduler(policy, options, n, max(lengths)) for n in options.slots_per_prompt}
    rates, shares = ({n: [] for n in schedulers} for _ in range(2))
    random = np.random.default_rng(0)
    for repeat in range(options.repeats + 1):
        order = random.permutation(len(prompts))
        for n, slots in schedulers.items():
            seconds, counters = run(slots, [prompts[i] for i in order], options)
            if repeat:
                rates[n].append(counters.num_kept_tokens / seconds)
                shares[n].append(counters.num_kept_tokens / counters.num_slot_steps)
    for n in schedulers:
        values = ", ".join(f"{rate:.1f}" for rate in rates[n])
        print(f"slots_per_prompt {n}: {values} tokens/s; slot utilisation {statistics.median(shares[n]):.3f}")


def make_prompts(policy: Policy, options: Options) -> list[Prompt]:
    """Returns few-shot prompts; the first problems are the solved ones of all."""
    lines = [json.loads(line) for line in options.problems.read_text(encoding="utf-8").splitlines()[: NUM_SHOTS + options.num_groups]]
    shots = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in lines[:NUM_SHOTS])
    texts = [f"{shots}Question: {line['question']}\nAnswer:" for line in lines[NUM_SHOTS:]]
    return [Prompt(prompt_id=i, token_ids=policy.tokenizer.encode_plain(text), text=text) for i, text in enumerate(texts)]


def open_scheduler(policy: Policy, options: Options, slots_per_prompt: int, max_prompt_tokens: int) -> SlotScheduler:
    """Returns a decoder of its own for one value."""
    engine = EngineConfig(
        num_slots=options.num_slots,
        slots_per_prompt=slots_per_prompt,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        kernels=options.kernels,
        stop_texts=("\n\n",),
    )
    return open_decoder(policy, PlacementConfig(kind="shared"), engine, 0)


def run(slots: SlotScheduler, prompts: Sequence[Prompt], options: Options):
    """Samples all groups to the end; returns the seconds and what was counted."""
    tickets = itertools.count()
    slots.submit(
        [
            CompletionRequest(
                ticket=next(tickets),
                prompt=prompt,
                sample_index=sample,
                sampling=SamplingConfig(temperature=1.0),
                max_new_tokens=options.max_new_tokens,
            )
            for prompt in prompts
            for sample in range(options.group_size)
        ]
    )
    start = time.perf_counter()
    while not slots.is_idle:
        slots.step()
    return time.perf_counter() - start, slots.take_counters()


if __name__ == "__main__":
    main(tyro.cli(Options))
