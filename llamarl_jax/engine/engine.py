"""The decoder on the generator mesh: bucketed prefill, insertion into fixed slots, and several decode steps per host round trip.

Compiled programs, all for the whole run:

| program | one for each |
|---|---|
| prefill | power-of-two prompt bucket × 1, 4, 16, … prompts of each replica, as many as a chunk holds |
| prefill, the next chunk | bucket longer than a chunk × chunk, a half, a quarter or an eighth of one |
| store a prompt | prefill × length of the prompts' cache |
| store a completion so far | prefill × length of the slots' own cache, where it is computed again |
| start | one |
| generate | pair of both lengths (× whether any slot truncates) |
| resize | change of a length |

Nothing that a replica of the mesh does needs another one: it prefills, keeps and completes prompts of its own, so no program has a
collective over the data axis. Both lengths are powers of two from 64 up to the longest prompt, and the longest completion. Temperature,
truncation, budgets, end-of-sequence ids and weights are traced, so changing them compiles nothing. Results cross to the host as one packed
int32 array per call, of which each replica sends its part.

Dimensions: S slots, N steps of a call, B prompts of a prefill, T prompt tokens, E end-of-sequence ids, W requests of an insert, D replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from llamarl_jax.engine.api import DecodeState, Prefilled, PrefillRequest, Prefix, ResultTokens, SlotRequest
from llamarl_jax.engine.kernel_choice import choose_kernels
from llamarl_jax.engine.sampling import SamplingArrays, completion_key, sample, token_uniforms
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.meshes import constrain, named_sharding, replicated
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
LAST_CHUNK_PARTS = 8
"""The last chunk of a long prompt is padded to a power of two, but to no less than this part of a chunk, so that there are few programs."""
MEMBERS_PER_SHARE = 4
"""Slots that may read one prompt row, as a multiple of `EngineConfig.slots_per_prompt`, where that is above 1."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shape of the decoder."""

    num_slots: int | Literal["auto"] = 32
    """Completions decoded at once, a multiple of the generator mesh's data axis; `auto` takes as many as fit the memory and as the schedule
    can have unfinished."""
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
    """Most prompt tokens that a replica computes between two decode calls: longer prompts are prefilled in chunks, shorter ones
    together."""
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


@dataclass(frozen=True)
class _PrefillBatch:
    """Prompts of one bucket that are prefilled together: rows of each replica, in order, padded with empty ones.

    Attributes:
        token_ids: int32 [B, T], without the prompts' last tokens.
        places: the request of each used row: (number, replica, row of the replica's part).
    """

    token_ids: np.ndarray
    rows_per_replica: int
    places: tuple[tuple[int, int, int], ...]
    longest: int

    def chunks(self, chunk_tokens: int) -> Iterator[tuple[int, int]]:
        """Returns start and length of each call, which together cover the longest prompt."""
        bucket, start = self.token_ids.shape[1], 0
        while start == 0 or start < self.longest:
            rest = max(prompt_bucket(self.longest - start), chunk_tokens // LAST_CHUNK_PARTS) if start else bucket
            length = min(rest, chunk_tokens, bucket - start)
            yield start, length
            start += length


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
        prefilled = state_shardings.cache, replicated(mesh)
        self._prefill_first = jax.jit(self._prefill_new, static_argnames="length", out_shardings=prefilled)
        self._prefill_next = jax.jit(self._prefill_chunk, donate_argnums=(1,), out_shardings=prefilled)
        self._store_prompt = jax.jit(self._copy_prompt, donate_argnums=(0,), out_shardings=state_shardings.prompts)
        self._store_own = jax.jit(self._copy_own, donate_argnums=(0,), out_shardings=state_shardings.cache)
        arrays = state_shardings._replace(cache=(), prompts=())
        self._start = jax.jit(self._start_slots, donate_argnums=(0,), out_shardings=arrays)
        self._resize = jax.jit(self._resize_cache, static_argnames="length", out_shardings=state_shardings.cache)
        self._release = jax.jit(self._release_slots, donate_argnums=(0,), out_shardings=state_shardings)
        packed = named_sharding(mesh, (None, "rows"), (1, self.num_slots))
        self._generate = jax.jit(
            self._generate_steps, donate_argnums=(1,), static_argnames="is_truncated", out_shardings=(state_shardings, packed)
        )

    def init_decode_state(self) -> DecodeState:
        """Returns a state with every slot free and the shortest cache."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def prefill(self, params: Params, requests: Sequence[PrefillRequest]) -> Iterator[Prefilled]:
        """Caches all but the last token of each prompt, those of one bucket together, long ones in chunks.

        Each item is the work of one turn, in which a replica computes at most `prefill_chunk_tokens`.

        Raises:
            ValueError: a prompt is empty or too long.
        """
        buckets: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            if not 1 <= (num_tokens := len(request.token_ids)) <= self.config.prefill_capacity:
                raise ValueError(
                    f"a prefill of {num_tokens} tokens; it must have 1 to {self.config.prefill_capacity}, which is what "
                    f"engine.max_prompt_tokens = {self.config.max_prompt_tokens} and max_new_tokens = {self.config.max_new_tokens} leave "
                    "room for; filter the prompts or raise the limit"
                )
            buckets.setdefault(min(prompt_bucket(num_tokens - 1), self.config.prefill_capacity), []).append(number)
        return self._prefill_in_turns(params, requests, buckets)

    def _prefill_in_turns(self, params: Params, requests: Sequence[PrefillRequest], buckets: dict[int, list[int]]) -> Iterator[Prefilled]:
        chunk_tokens, num_tokens, done, mark = self.config.prefill_chunk_tokens, 0, {}, None
        for batch in self._prefill_batches(requests, buckets):
            cache = None
            for start, length in batch.chunks(chunk_tokens):
                cost = batch.rows_per_replica * length
                if mark is not None and num_tokens + cost > chunk_tokens:
                    yield Prefilled(done, mark)
                    num_tokens, done = 0, {}
                token_ids = batch.token_ids[:, start : start + length]
                with jax.set_mesh(self.mesh):
                    if cache is None:
                        cache, mark = self._prefill_first(params, token_ids, length=batch.token_ids.shape[1])
                    else:
                        cache, mark = self._prefill_next(params, cache, token_ids, np.int32(start))
                num_tokens += cost
            assert cache is not None, "a batch has at least one chunk"
            for number, replica, row in batch.places:
                token_ids = requests[number].token_ids
                done[number] = Prefix(cache, replica, row, int(token_ids[-1]), len(token_ids))
        if mark is not None:
            yield Prefilled(done, mark)

    def _prefill_batches(self, requests: Sequence[PrefillRequest], buckets: dict[int, list[int]]) -> Iterator[_PrefillBatch]:
        for bucket, numbers in sorted(buckets.items()):
            queues: list[list[int]] = [[] for _ in range(self.num_replicas)]
            for number in numbers:
                queues[requests[number].replica].append(number)
            while most := max(map(len, queues)):
                rows = _prefill_rows(most, self.config.prefill_chunk_tokens // bucket)
                places = tuple((n, replica, row) for replica, queue in enumerate(queues) for row, n in enumerate(queue[:rows]))
                queues = [queue[rows:] for queue in queues]
                padded = np.zeros((self.num_replicas * rows, bucket), np.int32)
                for number, replica, row in places:
                    token_ids = requests[number].token_ids[:-1]
                    padded[replica * rows + row, : len(token_ids)] = token_ids
                yield _PrefillBatch(padded, rows, places, max(len(requests[n].token_ids) - 1 for n, _, _ in places))

    def bulk_insert(self, prefix: Prefix, state: DecodeState, requests: Sequence[SlotRequest]) -> DecodeState:
        """Starts completions of one prompt in free slots of the prefix's replica; the prefix stays usable, the old state does not.

        The caches must be long enough for them, see `fit`.

        Raises:
            ValueError: no request, prompts of different lengths or longer than the prefix, a slot or row of another replica, or a budget
                that does not fit the cache.
        """
        if not requests:
            raise ValueError("bulk_insert needs at least one request")
        if len(lengths := {request.num_prompt_tokens for request in requests}) > 1 or not 1 <= max(lengths) <= prefix.num_tokens:
            raise ValueError(
                f"the requests of an insert have prompts of {sorted(lengths)} tokens and a prefix of {prefix.num_tokens}; give the prefix "
                "of their one prompt"
            )
        num_prompt_tokens = lengths.pop()
        num_own = prefix.num_tokens - num_prompt_tokens
        for request in requests:
            places = request.slot * self.num_replicas // self.num_slots, request.prompt_row * self.num_replicas // self.num_prompt_rows
            if places != (prefix.replica, prefix.replica):
                raise ValueError(
                    f"slot {request.slot} and prompt row {request.prompt_row} are on the replicas {places[0]} and {places[1]}, but the "
                    f"prefix on {prefix.replica}; prefill the prompt on the replica of its slots"
                )
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
        functions |= {"init": self._init, "release": self._release}
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

    def _prefill_new(self, params: Params, token_ids: Int[Array, "B T"], *, length: int) -> tuple[KVCache, Int[Array, ""]]:
        cache = init_cache(self.spec.config, token_ids.shape[0], length, self.config.cache_dtype)
        return self._prefill_chunk(params, cache, token_ids, jnp.int32(0), num_seen=token_ids.shape[1])

    def _prefill_chunk(
        self, params: Params, cache: KVCache, token_ids: Int[Array, "B T"], start: Int[Array, ""], num_seen: int | None = None
    ) -> tuple[KVCache, Int[Array, ""]]:
        """Returns the cache, and a number that is there when the cache is; the next chunk takes the cache itself away."""
        token_ids = constrain(token_ids, "rows", None)
        starts = jnp.full(token_ids.shape[0], start)
        return self.spec.bind(params).extend(token_ids, starts, cache, num_seen=num_seen, dtype=self._dtype)[1], start + token_ids.shape[1]

    def _resize_cache(self, cache: KVCache, *, length: int) -> KVCache:
        return resize(cache, length)

    def _copy_prompt(self, prompts: KVCache, prefix: KVCache, row: Int[Array, ""], rows: Int[Array, " W"]) -> KVCache:
        """Copies one row of a replica's prefill to `rows` of its prompts' cache, as much as fits."""

        def copy(old: Array, new: Array, row: Array, rows: Array) -> Array:
            length = min(old.shape[2], new.shape[2])
            return old.at[rows, :, :length].set(new[row, :, :length].astype(old.dtype), mode="drop")

        return self._on_each_replica(copy, prompts, prefix, row, rows)

    def _copy_own(self, cache: KVCache, prefix: KVCache, row: Int[Array, ""], start: Int[Array, ""], slots: Int[Array, " W"]) -> KVCache:
        """Copies what one row of a replica's prefill has from `start` on to `slots` of its own caches, as much as fits."""

        def copy(old: Array, new: Array, row: Array, slots: Array, start: Array) -> Array:
            length = min(old.shape[2], new.shape[2])
            behind = jnp.roll(new[row], -start, axis=1)[:, :length]
            return old.at[slots, :, :length].set(behind.astype(old.dtype), mode="drop")

        return self._on_each_replica(copy, cache, prefix, row, slots, start)

    def _on_each_replica(
        self, copy: Callable[..., Array], old: KVCache, new: KVCache, row: Int[Array, ""], rows: Int[Array, " W"], *scalars: Array
    ) -> KVCache:
        """Calls `copy` with each replica's part of the arrays, `row` in it and where `rows` are in it: out of range if on another replica.

        The partitioner, which cannot know that both are on the same replica, would send prefills to all of them.
        """

        def on_replica(old: KVCache, new: KVCache, row: Array, rows: Array, *scalars: Array) -> KVCache:
            num_rows = old[0].keys.shape[0]
            local = rows - jax.lax.axis_index("data") * num_rows
            local = jnp.where((local >= 0) & (local < num_rows), local, num_rows)
            return jax.tree.map(lambda o, n: copy(o, n, row, local, *scalars), old, new)

        specs = jax.tree.map(lambda sharding: sharding.spec, self._state_shardings().cache)
        whole = PartitionSpec()
        mapped = jax.shard_map(
            on_replica, mesh=self.mesh, in_specs=(specs, specs, whole, whole, *[whole] * len(scalars)), out_specs=specs, check_vma=False
        )
        return mapped(old, new, row, rows, *scalars)

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
