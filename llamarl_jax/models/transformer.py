"""One decoder-only transformer (Flax NNX) for training and decoding: Llama 3, SmolLM2, Qwen2.5 and Qwen3 dense, by config.

The same `Block` runs in two forms. Training keeps the parameters of all layers stacked on a leading axis and scans over them, so that
126 layers compile as fast as one. Decoding keeps a list of layers, because a scan copies each layer's weights at every step, and stores
kernels that read the same input as one (`qkv_proj`, `gate_up_proj`), because XLA would otherwise join them at run time or run them one
by one. `llamarl_jax.models.decoding_form` turns one form into the other; it is part of the weight export.

Parameters live outside the modules as a plain nested dict; `TransformerSpec.bind(params)` returns a callable module. Each
parameter carries the logical names of its dimensions, from which `llamarl_jax.meshes` derives every sharding. Kernels are stored
(out, in) as in Hugging Face files, so loading and exporting never transposes.

Norms, softmax and log-softmax are float32 whatever the compute dtype. The LM head multiplies in the compute dtype, and its sums and logits
are float32. Ids that the tokenizer does not know (vocabulary padding) get a logit of −1e30 here, once, for trainer and decoder alike.

Dimensions: B rows, T tokens, D model, V vocabulary, H query heads, K key-value heads, Q head dim, F mlp, S slots, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from llamarl_jax.kernels import native
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.meshes import constrain, named_sharding
from llamarl_jax.models.attention import attend, attend_cache, attend_prompt_and_own, part_of
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.kv_cache import KVCache, LayerCache, cache_length, write
from llamarl_jax.models.prompt_index import PromptIndex
from llamarl_jax.models.rope import Rope, rope_tables, rotate
from llamarl_jax.quantization.fp8 import DTYPE as FP8_DTYPE
from llamarl_jax.quantization.fp8 import Mode, QuantizationConfig, fp8_product, quantize
from llamarl_jax.quantization.row_product import row_product

UNKNOWN_ID_LOGIT = -1e30
INIT_SCALE = 0.02
MOST_TENSOR_DEVICES = 64
"""Tensor-parallel devices, as a power of two, over which any fused mlp can be cut."""
UNQUANTIZED = QuantizationConfig()

Params = dict[str, Any]
Mixer = Callable[[Float[Array, "B T H Q"], Float[Array, "B T K Q"], Float[Array, "B T K Q"]], tuple[Array, LayerCache | None]]
"""Queries, keys and values of new tokens → what attention makes of them [B T H Q], and the cache that holds them, if there is one."""


class Linear(nnx.Module):
    """y = x · kernelᵀ + bias, with kernel (out, in); a float8 kernel has one scale for each output."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        axes: tuple[str, str],
        *,
        lead: tuple[int, ...],
        rngs: nnx.Rngs,
        has_bias: bool = False,
        mode: Mode = "none",
        kernels: Kernels = "xla",
    ):
        names: tuple[str, ...] = ("layers",) * len(lead)
        self.mode: Mode = mode
        self.kernels: Kernels = kernels
        kernel = jax.random.normal(rngs.params(), (*lead, out_size, in_size)) * INIT_SCALE
        scale = None
        if mode != "none":
            kernel, scale = quantize(kernel)
        self.kernel = nnx.Param(kernel, logical_axes=(*names, *axes))
        self.kernel_scale = None if scale is None else nnx.Param(scale, logical_axes=(*names, axes[0]))
        self.bias = nnx.Param(jnp.zeros((*lead, out_size)), logical_axes=(*names, axes[0])) if has_bias else None

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        """Applies the layer in the dtype of `x`."""
        if self.kernel_scale is None:
            kernel = jnp.asarray(self.kernel[...], x.dtype)
            if can_be_native(x, kernel, self.kernels):
                y = native.linear(x, kernel)
            else:
                y = jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())))
        else:
            y = fp8_product(x, self.kernel[...], self.kernel_scale[...], self.mode).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale in float32, over the last axis. "Root Mean Square Layer Normalization", arXiv 1910.07467."""

    def __init__(self, size: int, epsilon: float, *, lead: tuple[int, ...], kernels: Kernels = "xla"):
        self.epsilon = epsilon
        self.kernels: Kernels = kernels
        self.scale = nnx.Param(jnp.ones((*lead, size)), logical_axes=(*("layers",) * len(lead), "norm"))

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """Normalises the last axis; returns the dtype of `x`."""
        if self.kernels == "native" and native.can_normalise(x):
            return native.rms_norm(x, self.scale[...].astype(jnp.float32), self.epsilon)
        wide = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse_rms * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional biases (Qwen2.5) and per-head norms (Qwen3)."""

    def __init__(
        self, config: ModelConfig, *, lead: tuple[int, ...], rngs: nnx.Rngs, quantization: QuantizationConfig, kernels: Kernels = "xla"
    ):
        self.config, self.is_fused = config, not lead
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linear = partial(Linear, lead=lead, rngs=rngs, kernels=kernels)
        if self.is_fused:
            self.qkv_proj = linear(
                q_size + 2 * kv_size,
                config.hidden_size,
                ("qkv", "embed"),
                has_bias=config.has_qkv_bias,
                mode=quantization.mode_of("qkv_proj"),
            )
        else:
            self.q_proj = linear(q_size, config.hidden_size, ("heads", "embed"), has_bias=config.has_qkv_bias)
            self.k_proj = linear(kv_size, config.hidden_size, ("kv_heads", "embed"), has_bias=config.has_qkv_bias)
            self.v_proj = linear(kv_size, config.hidden_size, ("kv_heads", "embed"), has_bias=config.has_qkv_bias)
        self.o_proj = linear(config.hidden_size, q_size, ("embed", "heads"), mode=quantization.mode_of("o_proj"))
        norm = partial(RMSNorm, config.head_dim, config.rms_norm_eps, lead=lead, kernels=kernels)
        self.q_norm, self.k_norm = (norm(), norm()) if config.has_qk_norm else (None, None)

    def __call__(self, x: Float[Array, "B T D"], rope: Rope, mix: Mixer) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Projects tokens, mixes them with `mix`, and projects the result; returns `mix`'s cache too."""
        queries, keys, values = self._project(x)
        queries = rotate(queries if self.q_norm is None else self.q_norm(queries), *rope)
        keys = rotate(keys if self.k_norm is None else self.k_norm(keys), *rope)
        mixed, cache = mix(queries, keys, values)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), cache

    def _project(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H Q"], Float[Array, "B T K Q"], Float[Array, "B T K Q"]]:
        lead, head_dim = x.shape[:2], self.config.head_dim
        if not self.is_fused:
            queries, keys, values = (f(x).reshape(*lead, -1, head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
            return queries, keys, values
        # For each key-value head its query heads, its key and its value: a slice by tensor axis holds whole groups.
        heads = self.qkv_proj(x).reshape(*lead, self.config.num_kv_heads, -1, head_dim)
        return heads[:, :, :, :-2].reshape(*lead, -1, head_dim), heads[:, :, :, -2], heads[:, :, :, -1]


class Mlp(nnx.Module):
    """down(silu(gate(x)) · up(x)). "GLU Variants Improve Transformer", Shazeer, arXiv 2002.05202."""

    def __init__(
        self, config: ModelConfig, *, lead: tuple[int, ...], rngs: nnx.Rngs, quantization: QuantizationConfig, kernels: Kernels = "xla"
    ):
        linear = partial(Linear, lead=lead, rngs=rngs, kernels=kernels)
        self.kernels: Kernels = kernels
        self.block, self.is_fused = gate_up_block(config), not lead
        if self.is_fused:
            self.gate_up_proj = linear(
                2 * config.intermediate_size, config.hidden_size, ("gate_up", "embed"), mode=quantization.mode_of("gate_up_proj")
            )
        else:
            self.gate_proj = linear(config.intermediate_size, config.hidden_size, ("mlp", "embed"))
            self.up_proj = linear(config.intermediate_size, config.hidden_size, ("mlp", "embed"))
        self.down_proj = linear(config.hidden_size, config.intermediate_size, ("embed", "mlp"), mode=quantization.mode_of("down_proj"))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the gated mlp."""
        if not self.is_fused:
            return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
        pairs = self.gate_up_proj(x)
        if self.kernels == "native" and native.can_gate(pairs, self.block):
            return self.down_proj(native.swiglu(pairs, self.block))
        pairs = pairs.reshape(*x.shape[:2], -1, 2, self.block)
        return self.down_proj((jax.nn.silu(pairs[..., 0, :]) * pairs[..., 1, :]).reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """One pre-norm layer: attention and mlp, each behind a norm and a residual. `lead` is (num_layers,) for stacked parameters."""

    def __init__(
        self, config: ModelConfig, *, lead: tuple[int, ...], rngs: nnx.Rngs, quantization: QuantizationConfig, kernels: Kernels = "xla"
    ):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, lead=lead, kernels=kernels)
        self.attention = Attention(config, lead=lead, rngs=rngs, quantization=quantization, kernels=kernels)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, lead=lead, kernels=kernels)
        self.mlp = Mlp(config, lead=lead, rngs=rngs, quantization=quantization, kernels=kernels)

    def __call__(self, x: Float[Array, "B T D"], rope: Rope, mix: Mixer) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Applies the layer; arguments as for `Attention`."""
        with jax.named_scope("attention"):
            mixed, cache = self.attention(self.attention_norm(x), rope, mix)
            x = x + mixed
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "rows", None, None), cache


class Transformer(nnx.Module):
    """The whole network up to the logits; see the module docstring for its two forms."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        is_scanned: bool,
        rngs: nnx.Rngs,
        quantization: QuantizationConfig = UNQUANTIZED,
        kernels: Kernels = "xla",
    ):
        self.config = config
        self.kernels: Kernels = kernels
        self.embed = Embedding(config, rngs=rngs)
        if is_scanned:
            self.layers = Block(config, lead=(config.num_layers,), rngs=rngs, quantization=UNQUANTIZED)
        else:
            block = partial(Block, config, lead=(), rngs=rngs, quantization=quantization, kernels=kernels)
            self.layers = nnx.List([block() for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, lead=(), kernels=kernels)
        if not config.is_tied_embedding:
            mode = "none" if is_scanned else quantization.mode_of("lm_head")
            self.lm_head = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), lead=(), rngs=rngs, mode=mode)
        elif quantization.mode_of("lm_head") != "none":
            raise ValueError(
                "quantization.kernels has lm_head, but this model's LM head is its embedding (tie_word_embeddings), "
                "which is never quantised; leave lm_head out"
            )

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        prefix_ids: Int[Array, "B T"] | None = None,
        *,
        dtype: Any = jnp.float32,
        is_rematerialised: bool = False,
    ) -> Float[Array, "B T D"]:
        """Returns final hidden states of packed rows.

        A token sees the earlier tokens of its own segment and of the one that its prefix id names; padding (segment 0) sees nothing.
        """
        keys = segment_ids[:, None, :]
        is_seen = (segment_ids[:, :, None] == keys) & (segment_ids > 0)[:, :, None]
        if prefix_ids is not None:
            is_seen |= (prefix_ids[:, :, None] == keys) & (prefix_ids > 0)[:, :, None]
        mask = is_seen & jnp.tril(jnp.ones((token_ids.shape[1],) * 2, bool))

        def mix(queries: Array, keys: Array, values: Array) -> tuple[Array, None]:
            return attend(queries, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), mask), None

        x = constrain(self.embed(token_ids).astype(dtype), "rows", None, None)
        rope = rope_tables(self.config, positions)
        return self.final_norm(self._run_layers(x, rope, mix, is_rematerialised))

    def extend(
        self,
        token_ids: Int[Array, "B T"],
        start: Int[Array, " B"],
        cache: KVCache,
        *,
        num_seen: int | None = None,
        dtype: Any = jnp.float32,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Appends T tokens at positions start … start + T − 1 to every row of the cache; returns their hidden states and the cache.

        This is a prefill, or a chunk of one; it needs the list form of the layers.

        Args:
            num_seen: start + T where it is known, or a bound of it, so that no more of a long cache is read; None for all of it.
        """
        positions = start[:, None] + jnp.arange(token_ids.shape[1])[None, :]
        num_seen = cache_length(cache) if num_seen is None else num_seen
        mask = jnp.arange(num_seen) <= positions[:, :, None]

        def mix(old: LayerCache, queries: Array, keys: Array, values: Array) -> tuple[Array, LayerCache]:
            new = write(old, keys, values, start)
            return attend_cache(queries, jax.tree.map(lambda x: x[:, :, :num_seen], new), mask), new

        return self._run_list(token_ids, rope_tables(self.config, positions), [partial(mix, layer) for layer in cache], dtype)

    def step(
        self,
        token_ids: Int[Array, " S"],
        rope: Rope,
        cache: KVCache,
        own_positions: Int[Array, " S"],
        prompts: KVCache,
        index: PromptIndex,
        *,
        dtype: Any = jnp.float32,
    ) -> tuple[Float[Array, "S D"], KVCache]:
        """Appends one token to every slot, which sees its prompt and what its slot has of its own; needs the list form of the layers.

        Args:
            rope: `rope_tables` of the tokens' positions in their sequences [S, 1]. A loop over steps must carry them: of tables that are
                made in the step XLA computes cosines and sines again in every layer, for each head.
            cache: what slots have of their own; the tokens are stored in it.
            own_positions: where in it.
            prompts: caches of prompts.
            index: which slots read which of them.

        Returns:
            Hidden states, and the slots' own cache.
        """

        def mix(old: LayerCache, prompts: LayerCache, queries: Array, keys: Array, values: Array) -> tuple[Array, LayerCache]:
            if self.kernels == "native" and native.can_attend(queries, old.keys):
                tokens = (queries[:, 0], keys[:, 0], values[:, 0])
                mixed, *new = native.decode_attention(*tokens, old.keys, old.values, own_positions, prompts.keys, prompts.values, index)
                return mixed[:, None], LayerCache(*new)
            new = write(old, keys, values, own_positions)
            return attend_prompt_and_own(queries[:, 0], new, own_positions, prompts, index, part)[:, None], new

        part = part_of(self.kernels)
        mixers = [partial(mix, *layers) for layers in zip(cache, prompts, strict=True)]
        hidden, cache = self._run_list(token_ids[:, None], rope, mixers, dtype)
        return hidden[:, 0], cache

    def logits(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Returns float32 logits; ids unknown to the tokenizer get −1e30."""
        with jax.named_scope("lm_head"):
            logits = self._apply_head(hidden)
        if self.config.valid_vocab_size == self.config.vocab_size:
            return logits
        return jnp.where(jnp.arange(self.config.vocab_size) < self.config.valid_vocab_size, logits, UNKNOWN_ID_LOGIT)

    def _apply_head(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        head = None if self.config.is_tied_embedding else self.lm_head
        if head is not None and head.kernel_scale is not None:
            return fp8_product(hidden, head.kernel[...], head.kernel_scale[...], head.mode)
        # Operands stay in the compute dtype: a float32 copy of a bfloat16 kernel would be written at every decode step.
        kernel = jnp.asarray((self.embed.embedding if head is None else head.kernel)[...], hidden.dtype)
        return native.linear(hidden, kernel) if can_be_native(hidden, kernel, self.kernels) else row_product(hidden, kernel)

    def _run_list(
        self, token_ids: Int[Array, "B T"], rope: Rope, mixers: Sequence[Mixer], dtype: Any
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Runs the list form with a mixer for each layer; returns hidden states and the mixers' caches."""
        if isinstance(self.layers, Block):
            raise ValueError("decoding needs the list form of the layers; export the weights with llamarl_jax.weights first")
        x = constrain(self.embed(token_ids).astype(dtype), "rows", None, None)
        caches = []
        for block, mix in zip(self.layers, mixers, strict=True):
            x, cache = block(x, rope, mix)
            caches.append(cache)
        return self.final_norm(x), tuple(caches)

    def _run_layers(self, x: Float[Array, "B T D"], rope: Rope, mix: Mixer, is_rematerialised: bool) -> Float[Array, "B T D"]:
        if isinstance(self.layers, nnx.List):
            for block in self.layers:
                x, _ = block(x, rope, mix)
            return x
        graph, stacked = nnx.split(self.layers)

        def step(x: Array, layer: Any) -> tuple[Array, None]:
            x, _ = nnx.merge(graph, layer)(x, rope, mix)
            return x, None

        return jax.lax.scan(jax.checkpoint(step) if is_rematerialised else step, x, stacked)[0]


class Embedding(nnx.Module):
    """The table of token embeddings; it is the LM head too where the model ties them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size)) * INIT_SCALE
        self.embedding = nnx.Param(table, logical_axes=("vocab", "embed"))

    def __call__(self, token_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Looks tokens up."""
        return jnp.take(self.embedding[...], token_ids, axis=0)


def can_be_native(x: Float[Array, "*shape I"], kernel: Float[Array, "O I"], kernels: Kernels) -> bool:
    """Says whether native kernels were chosen and take a product of these shapes and types."""
    return kernels == "native" and native.can_multiply(x, kernel)


@dataclass(frozen=True)
class TransformerSpec:
    """What is known of a transformer without its weights.

    Attributes:
        graph: static structure for `bind`.
        shapes: nested dict of ShapeDtypeStruct (float32, or float8 where quantised).
        axes: nested dict of tuples of logical axis names.
    """

    config: ModelConfig
    graph: Any
    shapes: Params
    axes: Params
    quantization: QuantizationConfig = UNQUANTIZED

    @classmethod
    def build(
        cls, config: ModelConfig, *, is_scanned: bool, quantization: QuantizationConfig = UNQUANTIZED, kernels: Kernels = "xla"
    ) -> TransformerSpec:
        """Traces the constructor; allocates nothing. Only the list form can be quantised or use other kernels than XLA's."""
        make = partial(Transformer, config, is_scanned=is_scanned, quantization=quantization, kernels=kernels)
        model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        graph, state = nnx.split(model)
        axes = jax.tree.map(lambda v: v.get_metadata("logical_axes"), state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        return cls(config, graph, nnx.to_pure_dict(state), nnx.to_pure_dict(axes), quantization)

    def bind(self, params: Params) -> Transformer:
        """Returns the module with these parameters; cheap, meant to be called inside jit."""
        return nnx.merge(self.graph, params)

    def decoder_shapes(self, dtype: Any) -> Params:
        """Returns the shapes with the types that the decoder holds: `dtype`, but float8 kernels, their scales and all norms as they are."""
        return jax.tree_util.tree_map_with_path(lambda path, x: jax.ShapeDtypeStruct(x.shape, decoder_dtype(path, x, dtype)), self.shapes)

    def shardings(self, mesh: Mesh) -> Params:
        """Returns the sharding of every parameter on `mesh`."""
        return jax.tree.map(lambda shape, axes: named_sharding(mesh, axes, shape.shape, axis_units(self.config)), self.shapes, self.axes)

    def init(self, seed: int, mesh: Mesh) -> Params:
        """Returns random parameters of the spec's types, made on the mesh in their final sharding."""

        def make() -> Params:
            is_scanned = self.shapes["layers"].get("attention") is not None
            model = Transformer(self.config, is_scanned=is_scanned, rngs=nnx.Rngs(seed), quantization=self.quantization)
            return nnx.to_pure_dict(nnx.state(model, nnx.Param))

        return jax.jit(make, out_shardings=self.shardings(mesh))()


def decoder_dtype(path: tuple[Any, ...], leaf: Any, dtype: Any) -> Any:
    """Returns the type of one parameter in a decoder that computes in `dtype`; norms and scales are few numbers that touch every token."""
    is_kept = leaf.dtype == FP8_DTYPE or path[-1].key in ("scale", "kernel_scale")
    return leaf.dtype if is_kept else jnp.dtype(dtype)


def axis_units(config: ModelConfig) -> Mapping[str, int]:
    """Returns the smallest piece of each logical axis: a head is never cut, nor what a fused kernel keeps together."""
    group = config.num_heads // config.num_kv_heads
    return {
        "heads": config.head_dim,
        "kv_heads": config.head_dim,
        "qkv": (group + 2) * config.head_dim,
        "gate_up": 2 * gate_up_block(config),
    }


def gate_up_block(config: ModelConfig) -> int:
    """Returns how many rows of the gate kernel alternate with as many of the up kernel.

    A tensor axis can cut between blocks only: the largest power of two up to 128 that leaves 64 blocks, or as many as F allows.
    """
    return max(1, math.gcd(config.intermediate_size, 128 * MOST_TENSOR_DEVICES) // MOST_TENSOR_DEVICES)
