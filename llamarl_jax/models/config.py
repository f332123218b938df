"""The architecture of a dense decoder-only transformer, in one record that covers four families by numbers and switches.

| family            | model_type | q/k/v bias | q/k norm | remarks                                        |
|-------------------|------------|------------|----------|------------------------------------------------|
| Llama 3.x         | llama      | no         | no       | rotary frequencies scaled (`RopeScaling`)      |
| SmolLM2           | llama      | no         | no       | tied embeddings                                |
| Qwen2.5           | qwen2      | yes        | no       |                                                |
| Qwen3 (dense)     | qwen3      | no         | yes      | head_dim is not hidden_size / num_heads        |
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of long rotary wavelengths (rope type `llama3`); `models.rope` has the formula."""

    factor: float
    """How much the longest wavelengths are stretched."""
    low_freq_factor: float
    """Wavelengths above original_max_position_embeddings / low_freq_factor are stretched in full."""
    high_freq_factor: float
    """Wavelengths below original_max_position_embeddings / high_freq_factor are kept."""
    original_max_position_embeddings: int
    """Context length before scaling, in tokens."""

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope scaling with factor {self.factor} and original_max_position_embeddings "
                f"{self.original_max_position_embeddings}; both must be at least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling with low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; the first must be "
                "positive and below the second"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Numbers and switches of one transformer; `hf_config.from_hugging_face` reads them from a model folder."""

    vocab_size: int
    """Rows of the embedding, padding included."""
    valid_vocab_size: int
    """Ids that the tokenizer knows; logits at and beyond it are masked."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the mlp."""
    num_layers: int
    """Blocks of attention and mlp."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int
    """Width of a head; even, because rotary embeddings turn pairs."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's scaling, or None for plain rotary embeddings."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in every norm."""
    has_qkv_bias: bool = False
    """Biases on the query, key and value projections (qwen2)."""
    has_qk_norm: bool = False
    """Norms over the width of each query and key head (qwen3)."""
    is_tied_embedding: bool = True
    """The LM head is the embedding."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model was made for, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    """Every one of them ends a completion."""
    bos_token_id: int | None = None
    """Kept for export only; the tokenizer decides what a prompt begins with."""
    pad_token_id: int | None = None
    """Kept for export only; padding is marked by segment id 0 here."""
    model_type: str = "llama"
    """Family in Hugging Face's naming (llama, qwen2 or qwen3), which decides tensor names and the architecture written on export."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"model {name} is {value}; it must be at least 1")
        self._check_ids()
        self._check_heads()
        self._check_family()
        if self.rope_theta <= 0 or self.rms_norm_eps <= 0:
            raise ValueError(f"model rope_theta is {self.rope_theta} and rms_norm_eps {self.rms_norm_eps}; both must be positive")

    def _check_ids(self) -> None:
        if not 1 <= self.valid_vocab_size <= self.vocab_size:
            raise ValueError(
                f"model valid_vocab_size is {self.valid_vocab_size}, but vocab_size is {self.vocab_size}; it must be between 1 and "
                "vocab_size (does the tokenizer belong to this model?)"
            )
        if outside := [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"model eos_token_ids has {outside[0]}, not an id below vocab_size {self.vocab_size}; correct config.json")

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; each key-value head must serve "
                "equally many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model head_dim is {self.head_dim}; rotary embeddings need an even one")

    def _check_family(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {self.model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        expected = (self.model_type == "qwen2", self.model_type == "qwen3")
        if (self.has_qkv_bias, self.has_qk_norm) != expected:
            raise ValueError(
                f"model_type {self.model_type!r} goes with has_qkv_bias={expected[0]} and has_qk_norm={expected[1]}, not "
                f"{self.has_qkv_bias} and {self.has_qk_norm}; choose the model_type that has these "
                "(qwen2: bias, qwen3: norm), or it could not be exported"
            )
