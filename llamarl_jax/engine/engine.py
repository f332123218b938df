"""The decoder on the generator mesh: bucketed prefill, insertion into fixed slots, and several decode steps per host round trip.

Compiled programs, all for the whole run:

| program | one for each |
|---|---|
| prefill | power-of-two prompt bucket × 1, 4, 16, … prompts, as many as a chunk holds |
| store a prompt | prefill × length of the prompts' cache |
| store a completion so far | prefill × length of the slots' own cache, where it is computed again |
| start | one |
| generate | pair of both lengths (× whether any slot truncates) |
| resize | change of a length |

Both lengths are powers of two from 64 up to the longest prompt, and the longest completion. Temperature, truncation, budgets,
end-of-sequence ids and weights are traced, so changing them compiles nothing. Results cross to the host as one packed int32 array per call.

Dimensions: S slots, N steps of a call, B prompts of a prefill, T prompt tokens, E end-of-sequence ids, W requests of an insert.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from llamarl_jax.engine.api import DecodeState, Prefix, ResultTokens, SlotRequest
from llamarl_jax.engine.kernel_choice import choose_kernels
from llamarl_jax.engine.sampling import SamplingArrays, completion_key, sample, token_uniforms
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.meshes import named_sharding, replicated
from llamarl_jax.models.kv_cache import CACHE_AXES, CacheType, KVCache, LayerCache, cache_length, has_scales, init_cache, resize
from llamarl_jax.models.prompt_index import index_prompts
from llamarl_jax.models.rope import Rope, rope_tables
from llamarl_jax.models.transformer import Params, TransformerSpec, axis_units
from llamarl_jax.quantization.fp8 import QuantizationConfig

MIN_BUCKET_TOKENS = 16
MIN_CACHE_TOKENS = 64
MAX_INSERT_ROWS = 8
"""Requests that one insert call serves; fewer are padded."""
CAPACITY_MULTIPLE_TOKENS = 16
MEMBERS_PER_SHARE = 4
"""Slots that may read one prompt row, as a multiple of `EngineConfig.slots_per_prompt`, where that is above 1."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shape of the decoder."""

    num_slots: int | Literal["auto"] = 32
    """Completions decoded at once, a multiple of the generator mesh's data axis; `auto` takes as many as fit the memory."""
    slots_per_prompt: int = 1
    """Slots for each prompt that can be decoded at once. With n, the keys and values of a prompt are kept and read once for up to 4n
    completions; their memory falls by n, and no more than num_slots / n prompts run together, in evaluation too. A prompt runs until the
    last of its completions ends, so a quarter of schedule.group_size leaves room for that. 1: every completion has a copy of its prompt."""
    max_prompt_tokens: int = 512
    """Longest prompt; longer ones are counted and skipped."""
    max_new_tokens: int = 512
    """Longest completion, the end-of-sequence token included."""
    decode_steps_per_call: int = 8
    """Decode steps between two looks at the results; a slot that ends early idles for the rest of the call."""
    dispatch_ahead: int = 0
    """Calls that are dispatched before the results of the last are read. 1 hides the host's work on an accelerator; a slot that ends
    then idles for one call more."""
    prefill_chunk_tokens: int = 512
    """Most prompt tokens computed between two decode calls: longer prompts are prefilled in chunks, shorter ones together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in the decoder."""
    kv_dtype: Literal["same", "float8_e4m3fn", "int8"] = "same"
    """Type of the KV cache: that of the activations, or a quarter (half) of it with one scale for each token and head."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """float8 weights."""
    kernels: Literal["auto", "xla", "native", "pallas"] = "auto"
    """Who computes a decode step: XLA; on one CPU device in float32 kernels of our own in C++, compiled at first use (`native`); on NVIDIA
    GPUs a kernel of our own for attention, which reads no more of the caches than the slots have used (`pallas`). `auto` takes our own
    where the mesh can have them, and `native` only where there is a C++ compiler."""
    stop_texts: tuple[str, ...] = ()
    """Texts of one token each that end a completion besides the model's end-of-sequence ids, such as a newline for plain prompts."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "slots_per_prompt", "max_prompt_tokens", "max_new_tokens", "decode_steps_per_call"):
            if (value := getattr(self, name)) != "auto" and value < 1:
                raise ValueError(f"engine.{name} is {value}; it must be at least 1")
        if self.dispatch_ahead < 0:
            raise ValueError(f"engine.dispatch_ahead is {self.dispatch_ahead}; choose 0 (read each call at once) or more")
        if self.prefill_chunk_tokens != _power_of_two(max(self.prefill_chunk_tokens, MIN_BUCKET_TOKENS)):
            raise ValueError(
                f"engine.prefill_chunk_tokens is {self.prefill_chunk_tokens}; it must be a power of two from {MIN_BUCKET_TOKENS} on"
            )

    @property
    def prompt_capacity(self) -> int:
        """Most tokens of KV cache of a prompt."""
        return _rounded_up(self.max_prompt_tokens)

    @property
    def own_capacity(self) -> int:
        """Most tokens of KV cache that a slot has of its own."""
        return _rounded_up(self.max_new_tokens)

    @property
    def prefill_capacity(self) -> int:
        """Most tokens of a prefill, which is a prompt and, where a cache is computed again, its completion so far."""
        return max(prompt_bucket(self.max_prompt_tokens), _rounded_up(self.max_prompt_tokens + self.max_new_tokens))

    def num_prompt_rows(self, num_replicas: int) -> int:
        """Returns how many prompts can be decoded at once, a multiple of the replicas; the number of slots must be known."""
        assert self.num_slots != "auto"
        return num_replicas * -(-self.num_slots // (num_replicas * self.slots_per_prompt))

    @property
    def most_members(self) -> int:
        """Slots that may read one prompt row."""
        return 1 if self.slots_per_prompt == 1 else MEMBERS_PER_SHARE * self.slots_per_prompt

    @property
    def cache_dtype(self) -> CacheType:
        """Type of the KV cache."""
        return self.dtype if self.kv_dtype == "same" else self.kv_dtype

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Lengths that the prompts' cache takes, shortest first; the last one is its capacity."""
        return _lengths_up_to(self.prompt_capacity)

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Lengths that the slots' own cache takes, shortest first; the last one is its capacity."""
        return _lengths_up_to(self.own_capacity)


def prompt_bucket(num_tokens: int) -> int:
    """Returns the power of two (at least 16) to which a prompt is padded for prefill."""
    return max(MIN_BUCKET_TOKENS, _power_of_two(num_tokens))


class SlotArrays(NamedTuple):
    """Requests of one insert call as arrays; padding has a slot number that is out of range, and is dropped.

    `filled_rows` are their prompt rows, each once, padded likewise.
    """

    slots: np.ndarray
    prompt_rows: np.ndarray
    filled_rows: np.ndarray
    prompt_ids: np.ndarray
    sample_indices: np.ndarray
    max_new_tokens: np.ndarray
    sampling: SamplingArrays


@dataclass(frozen=True)
class PackedResult:
    """Results of one call as one device array: ids, bits of the log-probs, and who is live."""

    packed: Array
    num_steps: int

    def to_host(self) -> ResultTokens:
        """Waits for the call and returns its tokens."""
        packed, n = np.asarray(self.packed), self.num_steps
        token_ids, bits = packed[:n], np.ascontiguousarray(packed[n : 2 * n])
        return ResultTokens(token_ids, bits.view(np.float32), token_ids >= 0, packed[-1].astype(bool))


class DecodeEngine:
    """Implements `llamarl_jax.engine.api.Engine` for one transformer on one mesh (data × tensor)."""

    def __init__(
        self,
        spec: TransformerSpec,
        mesh: Mesh,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        kernels: Kernels | None = None,
    ) -> None:
        """Builds the jitted functions; compiles and allocates nothing.

        Args:
            spec: the list form of the transformer.
            eos_token_ids: every id that ends a completion; may be empty.
            seed: start of all random streams.
            kernels: who computes the decode step, whatever the config and the mesh say; None lets `choose_kernels` decide. Tests run a
                GPU's kernel on CPUs with "pallas_interpreted".

        Raises:
            ValueError: the slots cannot be split over the data axis, their number is not resolved, or kernels are asked for that this
                machine or mesh cannot have.
        """
        if config.num_slots == "auto":
            raise ValueError("engine.num_slots is 'auto'; llamarl_jax.engine.memory.resolve_slots makes it a number")
        if config.num_slots % mesh.shape["data"]:
            raise ValueError(
                f"engine.num_slots = {config.num_slots} cannot be split over {mesh.shape['data']} replicas of the generator mesh; "
                f"choose a multiple of {mesh.shape['data']}"
            )
        self.kernels = kernels or choose_kernels(config, mesh, spec.config)
        if self.kernels != "xla":
            spec = TransformerSpec.build(spec.config, is_scanned=False, quantization=spec.quantization, kernels=self.kernels)
        self.spec, self.mesh, self.config, self.seed = spec, mesh, config, seed
        self.num_slots, self.num_steps_per_call = config.num_slots, config.decode_steps_per_call
        self.num_replicas, self.most_members = mesh.shape["data"], config.most_members
        self.num_prompt_rows = config.num_prompt_rows(self.num_replicas)
        self._dtype = jnp.dtype(config.dtype)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._eos_array = np.array(sorted(self.eos_token_ids) or [-1], np.int32)
        state_shardings = self._state_shardings()
        self._init = jax.jit(self._init_state, out_shardings=state_shardings)
        self._prefill_first = jax.jit(self._prefill_new, static_argnames="length")
        self._prefill_next = jax.jit(self._prefill_chunk, donate_argnums=(1,))
        self._store_prompt = jax.jit(self._copy_prompt, donate_argnums=(0,), out_shardings=state_shardings.prompts)
        self._store_own = jax.jit(self._copy_own, donate_argnums=(0,), out_shardings=state_shardings.cache)
        arrays = state_shardings._replace(cache=(), prompts=())
        self._start = jax.jit(self._start_slots, donate_argnums=(0,), out_shardings=arrays)
        self._resize = jax.jit(self._resize_cache, static_argnames="length", out_shardings=state_shardings.cache)
        self._release = jax.jit(self._release_slots, donate_argnums=(0,), out_shardings=state_shardings)
        self._generate = jax.jit(
            self._generate_steps, donate_argnums=(1,), static_argnames="is_truncated", out_shardings=(state_shardings, replicated(mesh))
        )

    def init_decode_state(self) -> DecodeState:
        """Returns a state with every slot free and the shortest cache."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def prefill(self, params: Params, prompts: Sequence[np.ndarray]) -> Iterator[dict[int, Prefix]]:
        """Caches all but the last token of int32 [P] prompts, those of one bucket together, long ones in chunks.

        Each item is the work of one call (at most `prefill_chunk_tokens`), and holds the prompts that it finished, by their index.

        Raises:
            ValueError: a prompt is empty or too long.
        """
        buckets: dict[int, list[int]] = {}
        for index, token_ids in enumerate(prompts):
            if not 1 <= len(token_ids) <= self.config.prefill_capacity:
                raise ValueError(
                    f"prompt of {len(token_ids)} tokens; it must have 1 to engine.max_prompt_tokens = {self.config.max_prompt_tokens}; "
                    "filter the prompts or raise the limit"
                )
            buckets.setdefault(min(prompt_bucket(len(token_ids) - 1), self.config.prefill_capacity), []).append(index)
        return self._prefill_buckets(params, prompts, buckets)

    def _prefill_buckets(self, params: Params, prompts: Sequence[np.ndarray], buckets: dict[int, list[int]]) -> Iterator[dict[int, Prefix]]:
        for bucket, indices in sorted(buckets.items()):
            while indices:
                rows = _prefill_rows(len(indices), self.config.prefill_chunk_tokens // bucket)
                chosen, indices = indices[:rows], indices[rows:]
                padded = np.zeros((rows, bucket), np.int32)
                for row, index in enumerate(chosen):
                    padded[row, : len(prompts[index]) - 1] = prompts[index][:-1]
                longest = max(len(prompts[index]) - 1 for index in chosen)
                cache = yield from self._prefill_chunks(params, padded, longest)
                yield {index: Prefix(cache, row, int(prompts[index][-1]), len(prompts[index])) for row, index in enumerate(chosen)}

    def _prefill_chunks(self, params: Params, token_ids: np.ndarray, longest: int) -> Generator[dict[int, Prefix], None, KVCache]:
        """Dispatches one chunk between two items and returns the cache."""
        bucket, chunk = token_ids.shape[1], self.config.prefill_chunk_tokens
        with jax.set_mesh(self.mesh):
            cache = self._prefill_first(params, token_ids[:, :chunk], length=bucket)
        for start in range(chunk, longest, chunk):
            yield {}
            with jax.set_mesh(self.mesh):
                cache = self._prefill_next(params, cache, token_ids[:, start : start + chunk], np.int32(start))
        return cache

    def insert(self, prefix: Prefix, state: DecodeState, requests: Sequence[SlotRequest]) -> DecodeState:
        """Starts completions of one prompt in free slots; the prefix stays usable, the old state does not.

        The caches must be long enough for them, see `fit`.

        Raises:
            ValueError: no request, prompts of different lengths or longer than the prefix, or a budget that does not fit the cache.
        """
        if not requests:
            raise ValueError("insert needs at least one request")
        if len(lengths := {request.num_prompt_tokens for request in requests}) > 1 or not 1 <= max(lengths) <= prefix.num_tokens:
            raise ValueError(
                f"the requests of an insert have prompts of {sorted(lengths)} tokens and a prefix of {prefix.num_tokens}; give the prefix "
                "of their one prompt"
            )
        num_prompt_tokens = lengths.pop()
        num_own = prefix.num_tokens - num_prompt_tokens
        for request in requests:
            if request.max_new_tokens < 1 or num_own + request.max_new_tokens > self.config.own_capacity:
                raise ValueError(
                    f"a budget of {request.max_new_tokens} new tokens behind {num_own} does not fit the cache of "
                    f"{self.config.own_capacity}; choose 1 to engine.max_new_tokens = {self.config.max_new_tokens}"
                )
        row, num_shared = np.int32(prefix.row), np.int32(num_prompt_tokens - 1)
        for first in range(0, len(requests), MAX_INSERT_ROWS):
            arrays = self._slot_arrays(requests[first : first + MAX_INSERT_ROWS])
            with jax.set_mesh(self.mesh):
                prompts = self._store_prompt(state.prompts, prefix.cache, row, arrays.filled_rows)
                cache = state.cache
                if num_own:
                    cache = self._store_own(cache, prefix.cache, row, num_shared, arrays.slots)
                position = np.int32(prefix.num_tokens - 1)
                scalars = np.int32(prefix.last_token), position, num_shared
                started = self._start(state._replace(cache=(), prompts=()), *scalars, arrays)
            state = started._replace(cache=cache, prompts=prompts)
        return state

    def fit(self, state: DecodeState, num_prompt_tokens: int, num_new_tokens: int) -> DecodeState:
        """Makes the caches long enough for prompts and completions of so many tokens, and shorter where a shorter one has room to spare.

        Raises:
            ValueError: one would have to be longer than its capacity.
        """
        # A prompt's last token is fed by the first step, and is a slot's own.
        prompts = self._fit(state.prompts, num_prompt_tokens - 1, self.config.prompt_lengths, "max_prompt_tokens")
        return state._replace(cache=self._fit(state.cache, num_new_tokens, self.config.own_lengths, "max_new_tokens"), prompts=prompts)

    def _fit(self, cache: KVCache, num_tokens: int, lengths: Sequence[int], limit: str) -> KVCache:
        if num_tokens > lengths[-1]:
            raise ValueError(f"{num_tokens} tokens do not fit the cache of {lengths[-1]}; raise engine.{limit}")
        current, wanted = cache_length(cache), _first_not_below(lengths, num_tokens)
        if wanted < current:  # shorten it only with some air, so that it does not change at every call
            wanted = min(_first_not_below(lengths, num_tokens + num_tokens // 4), current)
        if wanted == current:
            return cache
        with jax.set_mesh(self.mesh):
            return self._resize(cache, length=wanted)

    def generate(self, params: Params, state: DecodeState, *, is_truncated: bool = False) -> tuple[DecodeState, PackedResult]:
        """Dispatches `decode_steps_per_call` steps for all slots and the copy of what they emit to the host."""
        with jax.set_mesh(self.mesh):
            state, packed = self._generate(params, state, self._eos_array, is_truncated=is_truncated)
        packed.copy_to_host_async()
        return state, PackedResult(packed, self.config.decode_steps_per_call)

    def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Frees slots that are still live; what they emitted so far is the caller's."""
        is_kept = np.ones(self.num_slots, bool)
        is_kept[list(slots)] = False
        with jax.set_mesh(self.mesh):
            return self._release(state, is_kept)

    def num_compilations(self) -> dict[str, int]:
        """Returns how many programs each jitted function holds, for tests and logs."""
        functions = {"prefill": self._prefill_first, "prefill_next": self._prefill_next, "store_prompt": self._store_prompt}
        functions |= {"store_own": self._store_own, "start": self._start, "generate": self._generate, "resize": self._resize}
        return {name: function._cache_size() for name, function in functions.items()}  # pyright: ignore[reportAttributeAccessIssue]

    def _slot_arrays(self, requests: Sequence[SlotRequest]) -> SlotArrays:
        num_padding = MAX_INSERT_ROWS - len(requests)
        padded = [*requests, *[requests[-1]] * num_padding]
        slots = [r.slot for r in requests] + [self.num_slots] * num_padding
        filled = sorted({r.prompt_row for r in requests})
        return SlotArrays(
            np.array(slots, np.int32),
            np.array([r.prompt_row for r in padded], np.int32),
            np.array(filled + [self.num_prompt_rows] * (MAX_INSERT_ROWS - len(filled)), np.int32),
            np.array([r.prompt_id for r in padded], np.uint32),
            np.array([r.sample_index for r in padded], np.uint32),
            np.array([r.max_new_tokens for r in padded], np.int32),
            SamplingArrays.of([r.sampling for r in padded]),
        )

    def _state_shardings(self) -> DecodeState:
        config, mesh = self.spec.config, self.mesh
        # Slots and prompt rows are both multiples of the replicas, and are split alike.
        cache_shape = (self.num_slots, config.num_kv_heads, 1, config.head_dim)
        # A cache dimension counts heads, so one head is one unit of it.
        cache = named_sharding(mesh, CACHE_AXES, cache_shape, {**axis_units(config), "kv_heads": 1})
        rows = named_sharding(mesh, ("rows",), (self.num_slots,))
        pairs = named_sharding(mesh, ("rows", None), (self.num_slots, 2))
        shardings: Any = DecodeState  # the tree of shardings has the state's structure, not its types
        layer: Any = LayerCache(cache, cache)  # pyright: ignore[reportArgumentType]
        if has_scales(self.config.cache_dtype):
            scales = named_sharding(mesh, CACHE_AXES[:3], cache_shape[:3], {**axis_units(config), "kv_heads": 1})
            layer = layer._replace(key_scales=scales, value_scales=scales)
        return shardings(
            cache=(layer,) * config.num_layers,
            prompts=(layer,) * config.num_layers,
            prompt_rows=rows,
            num_shared=rows,
            tokens=rows,
            positions=rows,
            remaining=rows,
            is_live=rows,
            key_data=pairs,
            sampling=SamplingArrays(rows, rows, rows, rows),  # pyright: ignore[reportArgumentType]
        )

    def _init_state(self) -> DecodeState:
        config, zeros = self.config, jnp.zeros(self.num_slots, jnp.int32)
        return DecodeState(
            cache=init_cache(self.spec.config, self.num_slots, config.own_lengths[0], config.cache_dtype),
            prompts=init_cache(self.spec.config, self.num_prompt_rows, config.prompt_lengths[0], config.cache_dtype),
            prompt_rows=zeros,
            num_shared=zeros,
            tokens=zeros,
            positions=zeros,
            remaining=zeros,
            is_live=zeros > 0,
            key_data=jnp.zeros((self.num_slots, 2), jnp.uint32),
            sampling=SamplingArrays(jnp.ones(self.num_slots), zeros, jnp.ones(self.num_slots), jnp.zeros(self.num_slots)),
        )

    def _prefill_new(self, params: Params, token_ids: Int[Array, "B T"], *, length: int) -> KVCache:
        cache = init_cache(self.spec.config, token_ids.shape[0], length, self.config.cache_dtype)
        return self._prefill_chunk(params, cache, token_ids, jnp.int32(0))

    def _prefill_chunk(self, params: Params, cache: KVCache, token_ids: Int[Array, "B T"], start: Int[Array, ""]) -> KVCache:
        starts = jnp.full(token_ids.shape[0], start)
        return self.spec.bind(params).extend(token_ids, starts, cache, dtype=self._dtype)[1]

    def _resize_cache(self, cache: KVCache, *, length: int) -> KVCache:
        return resize(cache, length)

    def _copy_prompt(self, prompts: KVCache, prefix: KVCache, row: Int[Array, ""], rows: Int[Array, " W"]) -> KVCache:
        """Copies one row of a prefill to `rows` of the prompts' cache, as much as fits."""

        def copy(old: Array, new: Array) -> Array:
            length = min(old.shape[2], new.shape[2])
            return old.at[rows, :, :length].set(new[row, :, :length].astype(old.dtype), mode="drop")

        return jax.tree.map(copy, prompts, prefix)

    def _copy_own(self, cache: KVCache, prefix: KVCache, row: Int[Array, ""], start: Int[Array, ""], slots: Int[Array, " W"]) -> KVCache:
        """Copies what one row of a prefill has from `start` on to `slots` of the slots' own cache, as much as fits."""

        def copy(old: Array, new: Array) -> Array:
            length = min(old.shape[2], new.shape[2])
            behind = jnp.roll(new[row], -start, axis=1)[:, :length]
            return old.at[slots, :, :length].set(behind.astype(old.dtype), mode="drop")

        return jax.tree.map(copy, cache, prefix)

    def _start_slots(
        self, state: DecodeState, last_token: Int[Array, ""], position: Int[Array, ""], num_shared: Int[Array, ""], requests: SlotArrays
    ) -> DecodeState:
        keys = jax.vmap(partial(completion_key, self.seed))(jnp.asarray(requests.prompt_ids), jnp.asarray(requests.sample_indices))

        def put(old: Array, new: Any) -> Array:
            return old.at[requests.slots].set(new, mode="drop")

        return DecodeState(
            cache=(),
            prompts=(),
            prompt_rows=put(state.prompt_rows, requests.prompt_rows),
            num_shared=put(state.num_shared, num_shared),
            tokens=put(state.tokens, last_token),
            positions=put(state.positions, position),
            remaining=put(state.remaining, requests.max_new_tokens),
            is_live=put(state.is_live, True),
            key_data=put(state.key_data, keys),
            sampling=jax.tree.map(put, state.sampling, requests.sampling),
        )

    def _release_slots(self, state: DecodeState, is_kept: Array) -> DecodeState:
        return state._replace(is_live=state.is_live & is_kept)

    def _generate_steps(
        self, params: Params, state: DecodeState, eos_token_ids: Int[Array, " E"], *, is_truncated: bool
    ) -> tuple[DecodeState, Array]:
        model = self.spec.bind(params)
        prompts, num_shared = state.prompts, state.num_shared
        index = index_prompts(
            state.prompt_rows,
            num_shared,
            state.is_live,
            num_prompts=self.num_prompt_rows,
            most_members=self.most_members,
            num_replicas=self.num_replicas,
        )

        def rope(positions: Int[Array, " S"]) -> Rope:
            return rope_tables(self.spec.config, positions[:, None])

        def step(carry: tuple[DecodeState, Rope], _: None) -> tuple[tuple[DecodeState, Rope], tuple[Array, Array]]:
            state, tables = carry
            own_positions = state.positions - num_shared
            hidden, cache = model.step(state.tokens, tables, state.cache, own_positions, prompts, index, dtype=self._dtype)
            uniforms = token_uniforms(state.key_data, state.positions)
            ids, logprobs = sample(model.logits(hidden), uniforms, state.sampling, is_truncated=is_truncated)
            emitted = jnp.where(state.is_live, ids, -1)
            advance = state.is_live.astype(jnp.int32)
            remaining = state.remaining - advance
            is_stopped = jnp.any(ids[:, None] == eos_token_ids[None, :], axis=-1)
            state = state._replace(
                cache=cache,
                tokens=jnp.where(state.is_live, ids, state.tokens),
                positions=state.positions + advance,
                remaining=remaining,
                is_live=state.is_live & ~is_stopped & (remaining > 0),
            )
            return (state, rope(state.positions)), (emitted, jax.lax.bitcast_convert_type(logprobs, jnp.int32))

        # Prompts do not change, so the loop does not carry them.
        first = state._replace(prompts=()), rope(state.positions)
        (state, _), (ids, bits) = jax.lax.scan(step, first, None, length=self.config.decode_steps_per_call)
        return state._replace(prompts=prompts), jnp.concatenate([ids, bits, state.is_live[None].astype(jnp.int32)])


def _prefill_rows(num_prompts: int, most: int) -> int:
    """Returns a power of four: the next larger one if at least half of it would be used, else the next smaller one."""
    larger = 1
    while larger < num_prompts and 4 * larger <= most:
        larger *= 4
    return larger if 2 * num_prompts >= larger else larger // 4


def _rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // CAPACITY_MULTIPLE_TOKENS) * CAPACITY_MULTIPLE_TOKENS


def _lengths_up_to(capacity: int) -> tuple[int, ...]:
    """Returns powers of two from the shortest cache on, and the capacity."""
    lengths = []
    while (length := MIN_CACHE_TOKENS << len(lengths)) < capacity:
        lengths.append(length)
    return (*lengths, capacity)


def _first_not_below(lengths: Sequence[int], num_tokens: int) -> int:
    return next((length for length in lengths if length >= num_tokens), lengths[-1])


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
