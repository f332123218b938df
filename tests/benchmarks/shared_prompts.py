"""What sharing prompts costs and saves when completions end as they like: groups of a real task through the scheduler and the engine.

    python -m tests.benchmarks.shared_prompts --problems gsm8k_test.jsonl

Every prompt holds three solved problems and one that is not; a completion ends at an empty line. For each value of
`engine.slots_per_prompt` the same groups are sampled to the end, in random order and several times, after one round that compiles. Printed
and saved as JSON are kept tokens per second of the whole run, prefill included, the share of slot steps that gave a kept token (it falls
where slots wait for a free prompt row), and where the device's seconds went.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from llamarl_jax.bench.disturbance import undisturbed
from llamarl_jax.bench.machine import hardware, versions
from llamarl_jax.bench.report import new_path, plain_facts, write_json
from llamarl_jax.bench.workload import describe_model
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, DecodeCounters, SlotScheduler
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
    max_disturbance: float = 0.05
    """As for `llamarl bench decode`."""
    output_dir: Path = Path("tests/benchmarks/results")
    """Folder for the JSON file."""


@dataclass(frozen=True)
class Sample:
    """One run to the end."""

    seconds: float
    disturbance: float
    counters: DecodeCounters

    @property
    def tokens_per_s(self) -> float:
        """Kept tokens of the whole run, prefill included."""
        return self.counters.num_kept_tokens / self.seconds

    @property
    def slot_utilisation(self) -> float:
        """Share of slot steps that gave a kept token."""
        return self.counters.num_kept_tokens / self.counters.num_slot_steps


@dataclass
class Report:
    """What was measured, by `slots_per_prompt`."""

    started: datetime.datetime
    model: str
    origin: str
    options: Options
    prompt_tokens: tuple[int, int]
    hardware: dict[str, Any] = field(default_factory=hardware)
    versions: dict[str, str] = field(default_factory=versions)
    samples: dict[int, list[Sample]] = field(default_factory=dict)


def main(options: Options) -> None:
    """Measures, prints a table and saves the numbers."""
    policy = open_policy(options.model)
    prompts = make_prompts(policy, options)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {options}")
    schedulers = {n: open_scheduler(policy, options, n, max(lengths)) for n in options.slots_per_prompt}
    report = Report(datetime.datetime.now(datetime.UTC), *describe_model(options.model, policy), options, (min(lengths), max(lengths)))
    random = np.random.default_rng(0)
    for repeat in range(options.repeats + 1):
        order = random.permutation(len(prompts))
        for n, slots in schedulers.items():
            sample = measure(slots, [prompts[i] for i in order], options)
            if repeat:
                report.samples.setdefault(n, []).append(sample)
                print(f"slots_per_prompt {n}, run {repeat}: {sample.tokens_per_s:.1f} tokens/s", flush=True)
    print_table(report)
    path = new_path(options.output_dir, report.started, "shared-prompts", report.model, "float32", report.hardware)
    write_json(as_plain(report), path)
    print(f"saved: {path}")


def print_table(report: Report) -> None:
    """Prints the medians."""
    print("slots_per_prompt  tokens/s  slot utilisation  prefill s  decode s  tail s")
    for n, samples in report.samples.items():
        values = [statistics.median(values) for values in zip(*(row(sample) for sample in samples), strict=True)]
        print("{:16d}  {:8.1f}  {:16.3f}  {:9.1f}  {:8.1f}  {:6.1f}".format(n, *values))


def row(sample: Sample) -> tuple[float, ...]:
    """Returns what the table shows of a run."""
    counters = sample.counters
    return sample.tokens_per_s, sample.slot_utilisation, counters.prefill_s, counters.decode_s, counters.tail_s


def as_plain(report: Report) -> dict[str, Any]:
    """Returns the report as JSON values."""
    runs = {
        str(n): [{**asdict(sample), "tokens_per_s": sample.tokens_per_s, "slot_utilisation": sample.slot_utilisation} for sample in samples]
        for n, samples in report.samples.items()
    }
    return {**plain_facts("shared-prompts", report), "prompt_tokens": report.prompt_tokens, "runs_by_slots_per_prompt": runs}


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


def measure(slots: SlotScheduler, prompts: Sequence[Prompt], options: Options) -> Sample:
    """Returns a run that other processes left alone, as far as there is one."""

    def run() -> tuple[float, DecodeCounters]:
        slots.take_counters()
        return sample_all(slots, prompts, options), slots.take_counters()

    (seconds, counters), disturbance = undisturbed(run, [os.getpid()], options.max_disturbance, print)
    return Sample(seconds, disturbance, counters)


def sample_all(slots: SlotScheduler, prompts: Sequence[Prompt], options: Options) -> float:
    """Samples all groups to the end; returns the seconds."""
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
    return time.perf_counter() - start


if __name__ == "__main__":
    main(tyro.cli(Options))
