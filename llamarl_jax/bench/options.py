"""What `llamarl bench decode` can be asked for; free of JAX, so that its help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_DECODE_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Measure the decoder on this machine, next to what the hardware allows, and save the numbers as JSON."""

    model: str = "smollm2-135m"
    """A model name, Hub id or folder as for `llamarl fetch`, or a shape with random weights: `1b`, `8b` (Llama 3)."""
    batches: tuple[int, ...] = (1, 16, 64)
    """Numbers of completions decoded at once."""
    prompt_tokens: int = 64
    """Length of every prompt."""
    new_tokens: int = 128
    """Length of every completion; nothing ends earlier."""
    samples_per_prompt: int = 1
    """Completions of each prompt, as `schedule.group_size` of a config."""
    slots_per_prompt: int = 1
    """As `engine.slots_per_prompt` of a config."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations, and of the KV cache if `kv_dtype` does not say otherwise."""
    kv_dtype: Literal["same", "float8_e4m3fn", "int8"] = "same"
    """Type of the KV cache, as `engine.kv_dtype` of a config."""
    quantization: Literal["none", "w8a16", "w8a8"] = "none"
    """float8 weights, alone or with float8 activations, as `engine.quantization.mode` of a config."""
    kernels: Literal["auto", "xla", "native", "pallas"] = "auto"
    """Who computes a step's products and attention, as `engine.kernels` of a config."""
    repeats: int = 3
    """Timed runs of each batch after one that compiles; medians are reported."""
    decode_steps_per_call: int = 8
    """Decode steps between two looks at the results, as `engine.decode_steps_per_call` of a config."""
    dispatch_ahead: int = 0
    """Calls that are dispatched before the results of the last are read, as `engine.dispatch_ahead` of a config."""
    seed: int = 0
    """Seed of the prompts, and of the weights of a random shape."""
    peers: bool = False
    """Also run the same work in transformers, Tunix and llama.cpp, by turns with ours; needs tests/benchmarks/peers/setup.sh."""
    profile: bool = False
    """Also trace one call of each batch and print where a decode step's time goes, by operation."""
    max_disturbance: float = 0.05
    """Share of all cores that other processes may use during a run; one with more is repeated, up to 8 times. Linux only."""
    limits_mib: int = 1024
    """Array whose reading measures the memory bandwidth, in MiB; it must be much larger than the caches."""
    output_dir: Path = Path("tests/benchmarks/results")
    """Folder for the JSON file."""

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("bench decode has no batches; give at least one, for instance --batches 1 16 64")
        counts = ("repeats", "decode_steps_per_call", "samples_per_prompt", "slots_per_prompt", "limits_mib")
        for name, value in {"batches": min(self.batches), **{name: getattr(self, name) for name in counts}}.items():
            if value < 1:
                raise ValueError(f"bench decode: {name} has {value}; it must be at least 1")
        for name, value in {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens}.items():
            if value < MIN_DECODE_TOKENS:
                raise ValueError(f"bench decode: {name} is {value}; it must be at least {MIN_DECODE_TOKENS}, so that both phases have work")
        if self.dispatch_ahead < 0:
            raise ValueError(f"bench decode: dispatch_ahead is {self.dispatch_ahead}; choose 0 (read each call at once) or more")
        if self.profile and self.dispatch_ahead:
            raise ValueError(
                f"bench decode: --profile traces one call from its dispatch to its results, but dispatch_ahead is {self.dispatch_ahead}, "
                "so that others are on their way; set --dispatch-ahead 0"
            )
        if self.profile and self.new_tokens < 2 * self.decode_steps_per_call:
            raise ValueError(
                f"bench decode: --profile traces the second call, but new_tokens is {self.new_tokens} and a call has "
                f"{self.decode_steps_per_call} steps; set --new-tokens to at least {2 * self.decode_steps_per_call}"
            )
