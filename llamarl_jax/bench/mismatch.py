"""`llamarl bench mismatch`: how far a decoder is from its trainer when its weights or its KV cache are rounded.

    prompts ──engine, nothing rounded, temperature 1──▶ one batch of token ids
                                                           │
                        ┌──────────────────────────────────┴──────────────┐
          trainer: stacked, float32 masters             decoder: list form, exported weights of a mode, KV cache of a type
                        └──▶ log π, all of the vocabulary    log μ ◀──────┘        for every mode × type

Every decoder is asked about the same tokens, so their distances differ by the rounding alone, and not by what they would have sampled
themselves. π against μ is the distance that training sees as `mismatch/*` and corrects with ratios; there is no staleness in it.

After training steps weights and logits have moved: give the folder that `llamarl export` wrote as the model.
"""

from __future__ import annotations

import datetime
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from llamarl_jax.bench.forcing import TEMPERATURE, ForcedBatch, Trainer
from llamarl_jax.bench.machine import hardware, versions
from llamarl_jax.bench.mismatch_options import MismatchOptions, WeightMode
from llamarl_jax.bench.mismatch_report import MismatchReport, VariantRow, as_plain, print_report
from llamarl_jax.bench.report import new_path, write_json
from llamarl_jax.bench.workload import PLACEMENT, describe_model
from llamarl_jax.data.files import JsonlPrompts
from llamarl_jax.data.procedural import ArithmeticPrompts
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest
from llamarl_jax.evaluate import open_decoder
from llamarl_jax.meshes import Meshes, build_meshes
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.kv_cache import CacheType, init_cache
from llamarl_jax.models.transformer import Params
from llamarl_jax.policy import Policy, open_policy
from llamarl_jax.quantization.fp8 import QuantizationConfig
from llamarl_jax.types import Prompt
from llamarl_jax.weights.export import WeightExporter, WeightsConfig, tree_bytes

MOST_SLOTS = 32
BUILT_IN_PROMPTS = PromptsConfig(
    source=ArithmeticPrompts(min_operand=0, max_operand=20, operators="+-", text="{a}{operator}{b}", split="eval", eval_share=0.3),
    template=PlainTemplate(text="3+5=8\n12+7=19\n9-2=7\n{question}="),
    is_shuffled=False,
)
"""The held-out problems of `configs/smollm2_arithmetic_cpu.py`, so that a model trained with it is asked what it was not trained on."""


def bench_mismatch(options: MismatchOptions, console: Console | None = None) -> Path:
    """Measures all variants, prints a table and returns the JSON file.

    Raises:
        FileNotFoundError: there is no such file of prompts.
        ValueError: it has too few prompts that are short enough.
    """
    console = console or Console()
    started = datetime.datetime.now(datetime.UTC)
    policy = open_policy(options.model)
    name, origin = describe_model(options.model, policy)
    console.print(f"{name}: completing {options.num_prompts} prompts", highlight=False)
    batch = make_batch(policy, options)
    meshes = build_meshes(PLACEMENT)
    masters = policy.load_params(meshes.trainer)
    trainer = Trainer(policy.stacked, masters, batch)
    report = MismatchReport(
        started=started,
        model=name,
        origin=origin,
        options=options,
        hardware=hardware(),
        versions=versions(),
        num_tokens=int(batch.is_completion.sum()),
        batch_fingerprint=batch.fingerprint,
        rows_per_chunk=trainer.rows_per_chunk,
        recorded=trainer.recorded_distance(),
    )
    path = new_path(options.output_dir, started, "mismatch", name, options.dtype, report.hardware)
    for mode in options.modes:
        report.rows += _measure_mode(mode, policy, meshes, masters, trainer, options, console)
        write_json(as_plain(report), path)  # after each mode, so that an interrupted run keeps what it has
    print_report(report, console)
    return path


def make_batch(policy: Policy, options: MismatchOptions) -> ForcedBatch:
    """Returns the prompts with what an unrounded decoder completes them with; the same seed gives the same ids.

    Raises:
        FileNotFoundError: there is no such file of prompts.
        ValueError: it has too few prompts that are short enough.
    """
    prompts = _prompts(policy, options)
    config = EngineConfig(
        num_slots=min(options.num_prompts, MOST_SLOTS),
        max_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts),
        max_new_tokens=options.new_tokens,
        dtype=options.dtype,
    )
    slots = open_decoder(policy, PLACEMENT, config, options.seed)
    sampling = SamplingConfig(temperature=TEMPERATURE)
    slots.submit(
        [
            CompletionRequest(ticket=i, prompt=prompt, sample_index=0, sampling=sampling, max_new_tokens=options.new_tokens)
            for i, prompt in enumerate(prompts)
        ]
    )
    finished = {}
    while not slots.is_idle:
        finished.update(slots.step())
    return ForcedBatch.of(prompts, [finished[i] for i in range(len(prompts))])


def cache_token_bytes(config: ModelConfig, dtype: CacheType) -> int:
    """Returns the bytes that one token takes in the KV cache of all layers, scales included."""
    return tree_bytes(jax.eval_shape(partial(init_cache, config, 1, 1, dtype)))


def _measure_mode(
    mode: WeightMode, policy: Policy, meshes: Meshes, masters: Params, trainer: Trainer, options: MismatchOptions, console: Console
) -> list[VariantRow]:
    """Exports the weights of one mode and forces the batch through them with each type of cache."""
    spec = policy.listed(QuantizationConfig(mode=mode))
    exporter = WeightExporter(policy.stacked, spec, meshes, options.dtype, WeightsConfig())
    params = exporter.send(masters)
    rows = []
    for kv_dtype in options.kv_dtypes:
        console.print(f"weights {mode}, KV cache {kv_dtype}", highlight=False)
        cache_dtype: CacheType = options.dtype if kv_dtype == "same" else kv_dtype
        rows.append(
            VariantRow(
                mode=mode,
                kv_dtype=kv_dtype,
                weight_bytes=exporter.num_bytes,
                cache_token_bytes=cache_token_bytes(policy.config, cache_dtype),
                distance=trainer.distance_to(spec, params, options.dtype, cache_dtype),
            )
        )
    return rows


def _prompts(policy: Policy, options: MismatchOptions) -> list[Prompt]:
    if options.prompts is None:
        config = BUILT_IN_PROMPTS
    else:
        source = JsonlPrompts(path=str(options.prompts), question_column=options.question_column, reference_column=None)
        config = PromptsConfig(source=source, template=PlainTemplate(), is_shuffled=False)
    stream = PromptStream(config, policy.tokenizer, max_prompt_tokens=options.max_prompt_tokens, seed=options.seed)
    prompts = stream.first(options.num_prompts)
    if len(prompts) < options.num_prompts:
        raise ValueError(
            f"bench mismatch: {len(prompts)} of the {len(stream)} prompts have at most {options.max_prompt_tokens} tokens, but num_prompts "
            f"is {options.num_prompts}; lower --num-prompts, raise --max-prompt-tokens, or give a file with more lines"
        )
    return prompts
