"""The decoder on the generator mesh: bucketed prefill, insertion into fixed slots, and several decode steps per host round trip.

Compiled programs: one prefill per (power-of-two prompt bucket, power-of-two number of prompts up to 8), one insert per such prefill and
power-of-two number of slots, one generate.
Temperature, budgets, end-of-sequence ids and weights are traced, so changing them compiles nothing.

Results cross to the host as one packed int32 array per call.

Dimensions: S slots, N steps of a call, R prompts of a prefill, P prompt tokens, E end-of-sequence ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from llamarl_jax.engine.api import DecodeState, Prefix, ResultTokens, SlotRequest
from llamarl_jax.engine.sampling import completion_key, sample, token_uniforms
from llamarl_jax.meshes import named_sharding, replicated
from llamarl_jax.models.kv_cache import CACHE_AXES, KVCache, LayerCache, init_cache
from llamarl_jax.models.transformer import Params, TransformerSpec, axis_units

MIN_BUCKET_TOKENS = 16
MAX_PREFILL_ROWS = 8
"""Prompts of one bucket that are prefilled in one call."""
CAPACITY_MULTIPLE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shape of the decoder."""

    num_slots: int = 32
    """Completions decoded at once; a multiple of the generator mesh's data axis."""
    max_prompt_tokens: int = 512
    """Longest prompt; longer ones are counted and skipped."""
    max_new_tokens: int = 512
    """Longest completion, the end-of-sequence token included."""
    decode_steps_per_call: int = 8
    """Decode steps between two looks at the results; a slot that ends early idles for the rest of the call."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, activations and KV cache in the decoder."""
    stop_texts: tuple[str, ...] = ()
    """Texts of one token each that end a completion besides the model's end-of-sequence ids, such as a newline for plain prompts."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_prompt_tokens", "max_new_tokens", "decode_steps_per_call"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"engine.{name} is {value}; it must be at least 1")

    @property
    def capacity(self) -> int:
        """Tokens of KV cache in each slot."""
        longest = self.max_prompt_tokens + self.max_new_tokens
        return max(prompt_bucket(self.max_prompt_tokens), -(-longest // CAPACITY_MULTIPLE_TOKENS) * CAPACITY_MULTIPLE_TOKENS)


def prompt_bucket(num_tokens: int) -> int:
    """Returns the power of two (at least 16) to which a prompt is padded for prefill."""
    return max(MIN_BUCKET_TOKENS, _power_of_two(num_tokens))


class SlotArrays(NamedTuple):
    """Requests of one insert call as arrays, padded by repeating the last one."""

    slots: np.ndarray
    prompt_ids: np.ndarray
    sample_indices: np.ndarray
    temperature: np.ndarray
    max_new_tokens: np.ndarray


class DecodeEngine:
    """Implements `llamarl_jax.engine.api.Engine` for one transformer on one mesh (data × tensor)."""

    def __init__(self, spec: TransformerSpec, mesh: Mesh, config: EngineConfig, *, eos_token_ids: Sequence[int], seed: int) -> None:
        """Builds the jitted functions; compiles and allocates nothing.

        Args:
            spec: the list form of the transformer.
            eos_token_ids: every id that ends a completion; may be empty.
            seed: start of all random streams.

        Raises:
            ValueError: the slots cannot be split over the data axis.
        """
        if config.num_slots % mesh.shape["data"]:
            raise ValueError(
                f"engine.num_slots = {config.num_slots} cannot be split over {mesh.shape['data']} replicas of the generator mesh; "
                f"choose a multiple of {mesh.shape['data']}"
            )
        self.spec, self.mesh, self.config, self.seed = spec, mesh, config, seed
        self.num_slots = config.num_slots
        self._dtype = jnp.dtype(config.dtype)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._eos_array = np.array(sorted(self.eos_token_ids) or [-1], np.int32)
        state_shardings = self._state_shardings()
        self._init = jax.jit(self._init_state, out_shardings=state_shardings)
        self._prefill = jax.jit(self._prefill_bucket)
        self._insert = jax.jit(self._insert_slots, donate_argnums=(0,), out_shardings=state_shardings)
        self._release = jax.jit(self._release_slots, donate_argnums=(0,), out_shardings=state_shardings)
        self._generate = jax.jit(self._generate_steps, donate_argnums=(1,), out_shardings=(state_shardings, replicated(mesh)))

    def init_decode_state(self) -> DecodeState:
        """Returns a state with every slot free."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def prefill(self, params: Params, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        """Caches all but the last token of int32 [P] prompts, those of one bucket together.

        Raises:
            ValueError: a prompt is empty or longer than `max_prompt_tokens`.
        """
        buckets: dict[int, list[int]] = {}
        for index, token_ids in enumerate(prompts):
            if not 1 <= len(token_ids) <= self.config.max_prompt_tokens:
                raise ValueError(
                    f"prompt of {len(token_ids)} tokens; it must have 1 to engine.max_prompt_tokens = {self.config.max_prompt_tokens}; "
                    "filter the prompts or raise the limit"
                )
            buckets.setdefault(prompt_bucket(len(token_ids) - 1), []).append(index)
        prefixes: dict[int, Prefix] = {}
        for bucket, indices in sorted(buckets.items()):
            for first in range(0, len(indices), MAX_PREFILL_ROWS):
                chosen = indices[first : first + MAX_PREFILL_ROWS]
                cache = self._prefill_rows(params, [prompts[i] for i in chosen], bucket)
                for row, index in enumerate(chosen):
                    prefixes[index] = Prefix(cache, row, int(prompts[index][-1]), len(prompts[index]))
        return [prefixes[index] for index in range(len(prompts))]

    def _prefill_rows(self, params: Params, prompts: Sequence[np.ndarray], bucket: int) -> KVCache:
        padded = np.zeros((_power_of_two(len(prompts)), bucket), np.int32)
        for row, token_ids in enumerate(prompts):
            padded[row, : len(token_ids) - 1] = token_ids[:-1]
        with jax.set_mesh(self.mesh):
            return self._prefill(params, padded)

    def insert(self, prefix: Prefix, state: DecodeState, requests: Sequence[SlotRequest]) -> DecodeState:
        """Starts completions of one prompt in free slots; the prefix stays usable, the old state does not.

        Raises:
            ValueError: no request, or a budget beyond `max_new_tokens`.
        """
        arrays = self._slot_arrays(requests)
        with jax.set_mesh(self.mesh):
            return self._insert(state, prefix.cache, np.int32(prefix.row), np.int32(prefix.last_token), np.int32(prefix.num_tokens), arrays)

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """Runs `decode_steps_per_call` steps for all slots and brings what they emitted to the host."""
        with jax.set_mesh(self.mesh):
            state, packed = self._generate(params, state, self._eos_array)
        return state, _unpack(np.asarray(packed), self.config.decode_steps_per_call)

    def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Frees slots that are still live; what they emitted so far is the caller's."""
        is_kept = np.ones(self.num_slots, bool)
        is_kept[list(slots)] = False
        with jax.set_mesh(self.mesh):
            return self._release(state, is_kept)

    def num_compilations(self) -> dict[str, int]:
        """Returns how many programs each jitted function holds, for tests and logs."""
        functions = {"prefill": self._prefill, "insert": self._insert, "generate": self._generate}
        return {name: function._cache_size() for name, function in functions.items()}  # pyright: ignore[reportAttributeAccessIssue]

    def _slot_arrays(self, requests: Sequence[SlotRequest]) -> SlotArrays:
        if not requests:
            raise ValueError("insert needs at least one request")
        for request in requests:
            if not 1 <= request.max_new_tokens <= self.config.max_new_tokens:
                raise ValueError(
                    f"a budget of {request.max_new_tokens} new tokens does not fit the cache; choose 1 to engine.max_new_tokens = "
                    f"{self.config.max_new_tokens}"
                )
        padded = [*requests, *[requests[-1]] * (_power_of_two(len(requests)) - len(requests))]  # writing the last one again changes nothing
        return SlotArrays(
            np.array([r.slot for r in padded], np.int32),
            np.array([r.prompt_id for r in padded], np.uint32),
            np.array([r.sample_index for r in padded], np.uint32),
            np.array([r.temperature for r in padded], np.float32),
            np.array([r.max_new_tokens for r in padded], np.int32),
        )

    def _state_shardings(self) -> DecodeState:
        config, mesh = self.spec.config, self.mesh
        cache_shape = (self.num_slots, config.num_kv_heads, self.config.capacity, config.head_dim)
        # A cache dimension counts heads, so one head is one unit of it.
        cache = named_sharding(mesh, CACHE_AXES, cache_shape, {**axis_units(config), "kv_heads": 1})
        rows = named_sharding(mesh, ("rows",), (self.num_slots,))
        pairs = named_sharding(mesh, ("rows", None), (self.num_slots, 2))
        shardings: Any = DecodeState  # the tree of shardings has the state's structure, not its types
        return shardings(
            cache=tuple(LayerCache(cache, cache) for _ in range(config.num_layers)),  # pyright: ignore[reportArgumentType]
            tokens=rows,
            positions=rows,
            remaining=rows,
            is_live=rows,
            key_data=pairs,
            temperature=rows,
        )

    def _init_state(self) -> DecodeState:
        zeros = jnp.zeros(self.num_slots, jnp.int32)
        return DecodeState(
            cache=init_cache(self.spec.config, self.num_slots, self.config.capacity, self._dtype),
            tokens=zeros,
            positions=zeros,
            remaining=zeros,
            is_live=zeros > 0,
            key_data=jnp.zeros((self.num_slots, 2), jnp.uint32),
            temperature=jnp.ones(self.num_slots, jnp.float32),
        )

    def _prefill_bucket(self, params: Params, token_ids: Int[Array, "R P"]) -> KVCache:
        cache = init_cache(self.spec.config, token_ids.shape[0], token_ids.shape[1], self._dtype)
        start = jnp.zeros(token_ids.shape[0], jnp.int32)
        return self.spec.bind(params).extend(token_ids, start, cache, dtype=self._dtype)[1]

    def _insert_slots(
        self,
        state: DecodeState,
        prefix: KVCache,
        row: Int[Array, ""],
        last_token: Int[Array, ""],
        num_tokens: Int[Array, ""],
        requests: SlotArrays,
    ) -> DecodeState:
        def copy(old: Array, new: Array) -> Array:
            return old.at[requests.slots, :, : new.shape[2]].set(new[row].astype(old.dtype))

        keys = jax.vmap(partial(completion_key, self.seed))(jnp.asarray(requests.prompt_ids), jnp.asarray(requests.sample_indices))
        at = requests.slots
        return DecodeState(
            cache=jax.tree.map(copy, state.cache, prefix),
            tokens=state.tokens.at[at].set(last_token),
            positions=state.positions.at[at].set(num_tokens - 1),
            remaining=state.remaining.at[at].set(requests.max_new_tokens),
            is_live=state.is_live.at[at].set(True),
            key_data=state.key_data.at[at].set(keys),
            temperature=state.temperature.at[at].set(requests.temperature),
        )

    def _release_slots(self, state: DecodeState, is_kept: Array) -> DecodeState:
        return state._replace(is_live=state.is_live & is_kept)

    def _generate_steps(self, params: Params, state: DecodeState, eos_token_ids: Int[Array, " E"]) -> tuple[DecodeState, Array]:
        model = self.spec.bind(params)

        def step(state: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, Array]]:
            hidden, cache = model.extend(state.tokens[:, None], state.positions, state.cache, dtype=self._dtype)
            uniforms = token_uniforms(state.key_data, state.positions)
            ids, logprobs = sample(model.logits(hidden[:, 0]), uniforms, state.temperature)
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
            return state, (emitted, jax.lax.bitcast_convert_type(logprobs, jnp.int32))

        state, (ids, bits) = jax.lax.scan(step, state, None, length=self.config.decode_steps_per_call)
        return state, jnp.concatenate([ids, bits, state.is_live[None].astype(jnp.int32)])


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _unpack(packed: np.ndarray, num_steps: int) -> ResultTokens:
    token_ids, bits, is_live = packed[:num_steps], packed[num_steps : 2 * num_steps], packed[-1]
    return ResultTokens(token_ids, np.ascontiguousarray(bits).view(np.float32), token_ids >= 0, is_live.astype(bool))
