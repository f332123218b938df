"""What one decode step must read and compute at least, and the time that the hardware needs for it.

A step of B slots reads every weight that takes part in a matrix product once, the keys and values of every prompt once however many slots
complete it, and those of every completion; nothing else grows with the model. It multiplies every such weight with B rows (2 FLOPs each),
and every query head with all keys and all values of its slot.

    time ≥ max(bytes / bandwidth, FLOPs / matmul peak)

The embedding table counts once where it is the LM head too. Looking up B of its rows is not counted, nor are norms, softmax and sampling.

Dimensions: B slots, D model, F mlp, V vocabulary, H query heads, K key-value heads, Q head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl_jax.models.config import ModelConfig


@dataclass(frozen=True)
class StepCost:
    """Least work of one decode step.

    Attributes:
        weight_bytes: weights read once.
        cache_bytes: keys and values of all prompts, and of all completions at their mean length.
        matmul_flops: of the weights.
        attention_flops: of scores and mixing.
    """

    weight_bytes: float
    cache_bytes: float
    matmul_flops: float
    attention_flops: float

    @property
    def num_bytes(self) -> float:
        """All bytes."""
        return self.weight_bytes + self.cache_bytes

    @property
    def num_flops(self) -> float:
        """All FLOPs."""
        return self.matmul_flops + self.attention_flops

    def limit_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Returns the least time of the step on hardware with these rates."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def kernel_params(config: ModelConfig) -> int:
    """Returns the number of weights in the layers' matrix products: layers · (D·(H + 2K)·Q + H·Q·D + 3·D·F)."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (q_size + 2 * kv_size) + q_size * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp)


def step_cost(
    config: ModelConfig,
    *,
    batch: int,
    num_prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    kernel_itemsize: int,
    head_itemsize: int,
    cache_itemsize: float,
) -> StepCost:
    """Returns the least work of a decode step, on average from the first one, which sees the prompt, to the last.

    Args:
        batch: slots, all live.
        num_prompts: different prompts that they complete.
        prompt_tokens, new_tokens: lengths of a prompt and of a completion.
        kernel_itemsize, head_itemsize, cache_itemsize: bytes of one number in the layers' kernels, the LM head and the cache.
    """
    kernels, head = kernel_params(config), config.vocab_size * config.hidden_size
    own_tokens = (new_tokens - 1) / 2
    read = num_prompts * prompt_tokens + batch * own_tokens
    cached = 2 * config.num_kv_heads * config.head_dim * config.num_layers * read
    attention = 4 * config.num_heads * config.head_dim * config.num_layers * batch * (prompt_tokens + own_tokens)
    weight_bytes = kernels * kernel_itemsize + head * head_itemsize
    return StepCost(weight_bytes, cached * cache_itemsize, 2 * (kernels + head) * batch, attention)
