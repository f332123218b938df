"""What `llamarl bench mismatch` can be asked for; free of JAX, so that its help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WeightMode = Literal["none", "w8a16", "w8a8"]
KVType = Literal["same", "float8_e4m3fn", "int8"]


@dataclass(frozen=True, kw_only=True)
class MismatchOptions:
    """Measure how far a decoder with rounded weights or a rounded KV cache is from the trainer, on one fixed batch, and save it as JSON.

    To see the distance after training steps, give the folder that `llamarl export` writes as the model.
    """

    model: str = "smollm2-135m"
    """A model name, Hub id or folder as for `llamarl fetch`."""
    modes: tuple[WeightMode, ...] = ("none", "w8a16", "w8a8")
    """Weights of the decoder, as `engine.quantization.mode` of a config; each is combined with each KV type."""
    kv_dtypes: tuple[KVType, ...] = ("same", "float8_e4m3fn", "int8")
    """Types of the KV cache, as `engine.kv_dtype` of a config; `same` is that of the activations."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the decoder's activations and of its weights that are not float8; the trainer is float32 always."""
    prompts: Path | None = None
    """JSON lines with one prompt each, taken as it is; without a file, sums and differences behind three solved ones."""
    question_column: str = "question"
    """Column of the file that holds the prompt."""
    num_prompts: int = 16
    """Prompts, from the start of the file; each is completed once."""
    max_prompt_tokens: int = 512
    """Longest prompt; longer ones are left out."""
    new_tokens: int = 128
    """Longest completion; one ends earlier where the model ends it."""
    seed: int = 0
    """Seed of the completions, which an unrounded decoder samples at temperature 1."""
    output_dir: Path = Path("tests/benchmarks/results")
    """Folder for the JSON file."""

    def __post_init__(self) -> None:
        for name, flag in {"modes": "--modes none w8a8", "kv_dtypes": "--kv-dtypes same int8"}.items():
            values = getattr(self, name)
            if not values:
                raise ValueError(f"bench mismatch has no {name}; give at least one, for instance {flag}")
            if repeated := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"bench mismatch: {name} has {', '.join(repeated)} more than once; name each once")
        for name in ("num_prompts", "max_prompt_tokens", "new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"bench mismatch: {name} is {value}; it must be at least 1")
