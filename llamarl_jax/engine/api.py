"""The decoder's contract, in JetStream's words: prefill a prompt, insert it into slots, generate for all slots at once.

A *prefix* is the cached prompt, a *slot* a row of the decode state, a *result* what one `generate` call emitted. The engine is a set of
pure functions on explicit state; weights are an argument of every call, so a weight update is nothing but passing other ones.
Who is in which slot, and when, is the business of `llamarl_jax.engine.slots`.

The state has two caches. A *prompt row* holds a prompt and is read by all slots that complete it, up to `most_members`. What comes behind
the prompt is each slot's own. Slots and prompt rows are split alike over the replicas of the mesh, in order. A prompt is prefilled on the
replica of the slots that complete it, where its row must be too.

`prefill` computes keys and values of all prompt tokens but the last. The last one is fed by the first decode step, so every sampled
token, the first included, comes from the same program and is stamped with the weights of its `generate` call.

Calls return as soon as they are dispatched; only `PendingResult.to_host` waits.

Dimensions: S slots, N decode steps of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from llamarl_jax.engine.sampling import SamplingArrays, SamplingConfig
from llamarl_jax.models.kv_cache import KVCache
from llamarl_jax.models.transformer import Params


class PrefillRequest(NamedTuple):
    """A prompt of int32 [P] ids, and the replica on which it is wanted."""

    token_ids: np.ndarray
    replica: int


class Prefix(NamedTuple):
    """A prefilled prompt: its replica, its row in that replica's part of cache arrays of a bucket's length (shared with the prompts
    prefilled along with it), the last prompt token, and the prompt's length in tokens.
    """

    cache: KVCache
    replica: int
    row: int
    last_token: int
    num_tokens: int


@runtime_checkable
class Mark(Protocol):
    """Something that the device has when it has done some work, such as an array."""

    def block_until_ready(self) -> Any:
        """Waits for it."""
        ...


class Prefilled(NamedTuple):
    """One turn of a prefill: the prefixes that it finished, by the number of their request, and what is there when it is done."""

    prefixes: dict[int, Prefix]
    mark: Mark


class DecodeState(NamedTuple):
    """All slots of a decoder; donated to every call that returns a new one.

    `tokens` is the id each slot feeds next, at `positions`; `remaining` is how many tokens it may still emit. A slot that is not live
    is computed along but emits nothing. Of its tokens, the first `num_shared` are in row `prompt_rows` of `prompts`, the others in
    `cache`; both are as long as `Engine.fit` has last made them.
    """

    cache: KVCache
    prompts: KVCache
    prompt_rows: Int[Array, " S"]
    num_shared: Int[Array, " S"]
    tokens: Int[Array, " S"]
    positions: Int[Array, " S"]
    remaining: Int[Array, " S"]
    is_live: Bool[Array, " S"]
    key_data: UInt32[Array, "S 2"]
    sampling: SamplingArrays


@dataclass(frozen=True, kw_only=True)
class SlotRequest:
    """One completion to start or to go on with: where it goes and what fixes its random numbers.

    Attributes:
        prompt_row: where its prompt is put.
        num_prompt_tokens: length of its prompt; what the prefix has behind that is the completion so far.
        max_new_tokens: tokens it may still emit, the end-of-sequence token included.
    """

    slot: int
    prompt_row: int
    num_prompt_tokens: int
    prompt_id: int
    sample_index: int
    sampling: SamplingConfig
    max_new_tokens: int


@dataclass(frozen=True)
class ResultTokens:
    """What one `generate` call emitted, on the host.

    `is_emitted[n, s]` says whether slot s emitted a token at step n; once False it stays False. `is_live[s]`: it wants to go on.
    """

    token_ids: np.ndarray  # int32 [N, S]
    logprobs: np.ndarray  # float32 [N, S]
    is_emitted: np.ndarray  # bool [N, S]
    is_live: np.ndarray  # bool [S]


@runtime_checkable
class PendingResult(Protocol):
    """What a `generate` call will have emitted; its copy to the host has begun."""

    def to_host(self) -> ResultTokens:
        """Waits for the call and returns its tokens."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Stateless decoder over a fixed number of slots."""

    num_slots: int
    num_prompt_rows: int
    most_members: int
    num_replicas: int
    num_steps_per_call: int
    eos_token_ids: frozenset[int]

    def init_decode_state(self) -> DecodeState:
        """Returns a state with every slot free and the shortest cache."""
        ...

    def prefill(self, params: Params, requests: Sequence[PrefillRequest]) -> Iterator[Prefilled]:
        """Caches prompts turn by turn: each item is the work of at most one chunk."""
        ...

    def bulk_insert(self, prefix: Prefix, state: DecodeState, requests: Sequence[SlotRequest]) -> DecodeState:
        """Starts completions of one prompt in free slots, and puts the prompt into their rows."""
        ...

    def fit(self, state: DecodeState, num_prompt_tokens: int, num_new_tokens: int) -> DecodeState:
        """Makes the caches long enough for prompts and completions of so many tokens, and no longer than they must be."""
        ...

    def generate(self, params: Params, state: DecodeState, *, is_truncated: bool) -> tuple[DecodeState, PendingResult]:
        """Runs several decode steps for all slots; `is_truncated` if any slot samples from a truncated distribution."""
        ...

    def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Frees slots that are still live."""
        ...
