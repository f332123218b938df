"""The decoder's contract, in JetStream's words: prefill a prompt, insert it into slots, generate for all slots at once.

A *prefix* is the cached prompt, a *slot* a row of the decode state, a *result* what one `generate` call emitted. The engine is a set of
pure functions on explicit state; weights are an argument of every call, so a weight update is nothing but passing other ones.
Who is in which slot, and when, is the business of `llamarl_jax.engine.slots`.

`prefill` computes keys and values of all prompt tokens but the last. The last one is fed by the first decode step, so every sampled
token, the first included, comes from the same program and is stamped with the weights of its `generate` call.

Dimensions: S slots, N decode steps of one call, K key-value heads, C capacity in tokens, Q head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from llamarl_jax.models.kv_cache import KVCache
from llamarl_jax.models.transformer import Params


class Prefix(NamedTuple):
    """A prefilled prompt: its row in cache arrays of a bucket's length (shared with the prompts prefilled along with it), the last prompt
    token, and the prompt's length in tokens.
    """

    cache: KVCache
    row: int
    last_token: int
    num_tokens: int


class DecodeState(NamedTuple):
    """All slots of a decoder; donated to every call that returns a new one.

    `tokens` is the id each slot feeds next, at `positions`; `remaining` is how many tokens it may still emit. A slot that is not live
    is computed along but emits nothing.
    """

    cache: KVCache
    tokens: Int[Array, " S"]
    positions: Int[Array, " S"]
    remaining: Int[Array, " S"]
    is_live: Bool[Array, " S"]
    key_data: UInt32[Array, "S 2"]
    temperature: Float[Array, " S"]


@dataclass(frozen=True, kw_only=True)
class SlotRequest:
    """One completion to start: where it goes and what fixes its random numbers.

    Attributes:
        temperature: 0 takes the most likely token.
        max_new_tokens: budget, the end-of-sequence token included.
    """

    slot: int
    prompt_id: int
    sample_index: int
    temperature: float
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
class Engine(Protocol):
    """Stateless decoder over a fixed number of slots."""

    num_slots: int
    eos_token_ids: frozenset[int]

    def init_decode_state(self) -> DecodeState:
        """Returns a state with every slot free."""
        ...

    def prefill(self, params: Params, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        """Caches prompts of int32 [P] ids; results in order."""
        ...

    def insert(self, prefix: Prefix, state: DecodeState, requests: Sequence[SlotRequest]) -> DecodeState:
        """Starts completions of one prompt in free slots."""
        ...

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        """Runs several decode steps for all slots."""
        ...
