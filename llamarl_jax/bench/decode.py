"""`llamarl bench decode`: tokens per second of the real decoder, and what share that is of what the hardware allows.

The work goes through the same scheduler and engine as in training: B completions in B slots, greedy, no end of sequence, so every
completion has the same length and every step the same shape. A first run compiles everything and is not counted.

With peers, each runs in a process and a virtual environment of its own and is given the same ids; runs alternate (ours, then each peer,
then ours again), so that a machine that slows down slows all of them down. For the same reason the hardware is measured right before and
right after each run of ours, and that run is compared with the better of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from llamarl_jax.bench.decode_cost import StepCost, step_cost
from llamarl_jax.bench.disturbance import undisturbed
from llamarl_jax.bench.limits import measure_limits
from llamarl_jax.bench.machine import hardware, load_average, versions
from llamarl_jax.bench.op_profile import profile_ops
from llamarl_jax.bench.options import DecodeOptions
from llamarl_jax.bench.peers import Peer, PeerError, open_peers
from llamarl_jax.bench.report import DecodeReport, print_report, report_path, save_report
from llamarl_jax.bench.sample import OURS, Row, Runner, Sample, TokenIds, agreement
from llamarl_jax.bench.workload import Workload, make_prompts, open_workload
from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.engine.kernel_choice import choose_kernels
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.models.kv_cache import has_scales
from llamarl_jax.types import Prompt


class OurDecoder:
    """Decodes batches of one size with our scheduler and engine."""

    name = OURS

    def __init__(self, workload: Workload, batch: int, options: DecodeOptions) -> None:
        config = EngineConfig(
            num_slots=batch,
            slots_per_prompt=options.slots_per_prompt,
            max_prompt_tokens=options.prompt_tokens,
            max_new_tokens=options.new_tokens,
            decode_steps_per_call=options.decode_steps_per_call,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            quantization=workload.spec.quantization,
            kernels=options.kernels,
        )
        self.pid = os.getpid()
        self.engine = DecodeEngine(workload.spec, workload.mesh, config, eos_token_ids=(), seed=options.seed)
        self.slots = SlotScheduler(self.engine, workload.params, version=0, dispatch_ahead=options.dispatch_ahead)
        self._prompt_ids = itertools.count()  # the scheduler would use the prefix of an equal id again

    def run(self, prompts: TokenIds, new_tokens: int) -> Sample:
        """Decodes the prompts and times it."""
        self.slots.take_counters()
        start = time.perf_counter()
        self.submit(prompts, new_tokens)
        finished, counted = {}, []
        while not self.slots.is_idle:
            finished.update(self.slots.step())
            counted.append(self.slots.take_counters())
        total_s = time.perf_counter() - start
        return Sample(
            total_s=total_s,
            prefill_s=sum(counters.prefill_s for counters in counted),
            decode_steps=new_tokens,
            # Of the calls that a `step` has read; one that is dispatched ahead is read by a later one.
            step_s=statistics.median(c.decode_s * self.engine.num_slots / c.num_slot_steps for c in counted if c.num_slot_steps),
            token_ids=[finished[i].token_ids.tolist() for i in range(len(prompts))],
        )

    def submit(self, prompts: TokenIds, new_tokens: int) -> None:
        """Queues greedy completions of the prompts; equal ones that follow each other are samples of one prompt."""
        tickets = itertools.count()
        for ids, samples in itertools.groupby(prompts):
            prompt = Prompt(prompt_id=next(self._prompt_ids), token_ids=np.array(ids, np.int32), text="")
            self.slots.submit(
                [
                    CompletionRequest(
                        ticket=next(tickets),
                        prompt=prompt,
                        sample_index=sample_index,
                        sampling=SamplingConfig(temperature=0.0),
                        max_new_tokens=new_tokens,
                    )
                    for sample_index, _ in enumerate(samples)
                ]
            )


def bench_decode(options: DecodeOptions, console: Console | None = None) -> Path:
    """Measures, prints a table and returns the JSON file.

    Raises:
        ValueError: peers are wanted for a model that has no folder, or kernels that this machine cannot have.
    """
    console = console or Console()
    console.print(f"loading {options.model}", highlight=False)
    load_before, started = load_average(), datetime.datetime.now(datetime.UTC)
    workload = open_workload(options)
    kernels = choose_kernels(EngineConfig(dtype=options.dtype, kernels=options.kernels), workload.mesh, workload.config)
    options = dataclasses.replace(options, kernels=kernels)  # the file says what was used
    if options.peers and workload.folder is None:
        raise ValueError(f"--peers reads a model folder, but {options.model!r} is a shape with random weights; give --model a folder")
    report = DecodeReport(
        started=started,
        model=workload.name,
        origin=workload.origin,
        options=options,
        hardware=hardware(),
        versions=versions(),
        load_average=load_before,
    )
    path = report_path(report)
    with contextlib.ExitStack() as stack:
        peers, left_out = open_peers(workload.folder, stack) if options.peers and workload.folder else ([], {})
        report.versions.update({peer.name: peer.version for peer in peers})
        for batch in options.batches:
            ours = OurDecoder(workload, batch, options)
            rows = _measure_batch(ours, peers, workload, batch, options, left_out, console)
            profile = _profile(ours, workload, batch, options, console) if options.profile else []
            report.add(batch, _cost(workload, batch, options), rows, profile, left_out)
            save_report(report, path)  # after each batch, so that an interrupted run keeps what it has
    print_report(report, console)
    save_report(report, path)
    return path


def _measure_batch(
    ours: OurDecoder,
    peers: list[Peer],
    workload: Workload,
    batch: int,
    options: DecodeOptions,
    left_out: dict[str, str],
    console: Console,
) -> list[Row]:
    """Runs ours and the peers by turns; a peer that fails is left out from then on, with its reason."""
    prompts = _prompts(workload, batch, options)
    samples: dict[str, list[Sample]] = {}
    runners: list[Runner] = [ours, *peers]
    for repeat in range(options.repeats + 1):
        for runner in runners:
            if runner.name in left_out:
                continue
            console.print(f"batch {batch}, {f'run {repeat}' if repeat else 'warm-up'}: {runner.name}", highlight=False)
            try:
                if not repeat:
                    runner.run(prompts, options.new_tokens)
                    continue
                sample = _timed(runner, prompts, options, console)
            except PeerError as error:
                left_out[runner.name] = f"batch {batch}: {error}"
                continue
            samples.setdefault(runner.name, []).append(sample)
            console.print(f"  {sample.decode_tokens_per_s:,.1f} tokens/s", highlight=False)
    expected = samples[OURS][0].token_ids
    return [
        Row(runner=name, batch=batch, samples=tuple(taken), agreement=agreement(expected, taken[0].token_ids))
        for name, taken in samples.items()
    ]


def _timed(runner: Runner, prompts: TokenIds, options: DecodeOptions, console: Console) -> Sample:
    """Returns a run that other processes left alone, as far as there is one; ours with the hardware's rates beside it."""
    pids = [os.getpid(), runner.pid] if runner.pid != os.getpid() else [runner.pid]
    run = partial(_beside_limits, runner, options) if runner.name == OURS else runner.run
    sample, disturbance = undisturbed(
        lambda: run(prompts, options.new_tokens), pids, options.max_disturbance, partial(console.print, highlight=False)
    )
    return dataclasses.replace(sample, disturbance=disturbance)


def _beside_limits(runner: Runner, options: DecodeOptions, prompts: TokenIds, new_tokens: int) -> Sample:
    """Returns a run with the higher rates of two measurements of the hardware, right before and right after it."""
    before = measure_limits(options.dtype, options.limits_mib << 20)
    sample = runner.run(prompts, new_tokens)
    return dataclasses.replace(sample, limits=before.best(measure_limits(options.dtype, options.limits_mib << 20)))


def _prompts(workload: Workload, batch: int, options: DecodeOptions) -> TokenIds:
    return make_prompts(workload.config, batch, options.prompt_tokens, options.seed, samples=options.samples_per_prompt)


def _cost(workload: Workload, batch: int, options: DecodeOptions) -> StepCost:
    itemsize = np.dtype(jax.numpy.dtype(options.dtype)).itemsize
    return step_cost(
        workload.config,
        batch=batch,
        num_prompts=-(-batch // options.samples_per_prompt),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        kernel_itemsize=itemsize if options.quantization == "none" else 1,
        head_itemsize=itemsize,
        cache_itemsize=_cache_itemsize(workload, options),
    )


def _cache_itemsize(workload: Workload, options: DecodeOptions) -> float:
    """Returns the bytes of one number in the KV cache, its share of a scale included."""
    cache_dtype = EngineConfig(dtype=options.dtype, kv_dtype=options.kv_dtype).cache_dtype
    scale = np.dtype(np.float32).itemsize / workload.config.head_dim if has_scales(cache_dtype) else 0
    return np.dtype(jax.numpy.dtype(cache_dtype)).itemsize + scale


def _profile(ours: OurDecoder, workload: Workload, batch: int, options: DecodeOptions, console: Console) -> list[dict[str, Any]]:
    """Traces the second call of a run, when everything is compiled and prefilled."""
    steps = ours.engine.config.decode_steps_per_call
    prompts = _prompts(workload, batch, options)

    def run() -> list[dict[str, Any]]:
        ours.submit(prompts, 2 * steps)
        ours.slots.step()
        return profile_ops(ours.slots.step, num_steps=steps)

    return undisturbed(run, [os.getpid()], options.max_disturbance, partial(console.print, highlight=False))[0]
