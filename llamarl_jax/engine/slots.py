"""Continuous batching: keeps the slots of an engine full and puts finished completions together.

Requests wait in one queue, first come, first served. Before each `generate` call every free slot is filled; requests of the same prompt
share one prefill. A slot that ended is free again before the next call, so a long completion never holds up its neighbours' successors.

Weights may be swapped between two calls. Tokens are stamped with the version that was in force during their call, and a kept prefix
is dropped, since it belongs to the old weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamarl_jax.engine.api import Engine, Prefix, SlotRequest
from llamarl_jax.models.transformer import Params
from llamarl_jax.types import Completion, FinishReason, Prompt


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One completion that is wanted; `ticket` comes back with it and means something to the caller only."""

    ticket: int
    prompt: Prompt
    sample_index: int
    temperature: float
    max_new_tokens: int


@dataclass
class DecodeCounters:
    """What the decoder has done since the counters were last taken.

    Attributes:
        num_slot_steps: decode steps × slots that were computed.
        num_kept_tokens: tokens that ended up in completions.
        num_prefills: prompts prefilled.
        num_prefill_tokens: their tokens.
    """

    num_slot_steps: int = 0
    num_kept_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0


@dataclass
class _Tenant:
    request: CompletionRequest
    token_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    weight_versions: list[np.ndarray] = field(default_factory=list)


class SlotScheduler:
    """Drives one engine; not thread-safe, owned by the generator."""

    def __init__(self, engine: Engine, params: Params, version: int) -> None:
        self._engine = engine
        self._params, self._version = params, version
        self._state = engine.init_decode_state()
        self._tenants: dict[int, _Tenant] = {}
        self._free = list(range(engine.num_slots))[::-1]
        self._queue: deque[CompletionRequest] = deque()
        self._prefix: tuple[int, Prefix] | None = None
        self._counters = DecodeCounters()

    @property
    def version(self) -> int:
        """Version of the weights in force."""
        return self._version

    @property
    def params(self) -> Params:
        """The weights in force."""
        return self._params

    @property
    def is_idle(self) -> bool:
        """True when nothing runs and nothing waits."""
        return not self._tenants and not self._queue

    @property
    def num_vacancies(self) -> int:
        """Slots that the queue does not fill yet; 0 or less means that new requests would wait."""
        return len(self._free) - len(self._queue)

    def submit(self, requests: Sequence[CompletionRequest]) -> None:
        """Queues completions; those of one prompt should come together so that they share its prefill."""
        self._queue.extend(requests)

    def swap_weights(self, params: Params, version: int) -> None:
        """Puts new weights in force for all later calls; running completions go on with their old KV cache."""
        self._params, self._version = params, version
        self._prefix = None

    def step(self) -> list[tuple[int, Completion]]:
        """Fills free slots, runs one `generate` call, and returns the completions that ended, with their tickets."""
        self._fill()
        if not self._tenants:
            return []
        self._state, result = self._engine.generate(self._params, self._state)
        self._counters.num_slot_steps += result.token_ids.size
        finished = []
        for slot, tenant in sorted(self._tenants.items()):
            num_emitted = int(result.is_emitted[:, slot].sum())
            tenant.token_ids.append(result.token_ids[:num_emitted, slot])
            tenant.logprobs.append(result.logprobs[:num_emitted, slot])
            tenant.weight_versions.append(np.full(num_emitted, self._version, np.int32))
            self._counters.num_kept_tokens += num_emitted
            if not result.is_live[slot]:
                finished.append((tenant.request.ticket, self._completion(tenant)))
                self._vacate(slot)
        return finished

    def take_counters(self) -> DecodeCounters:
        """Returns the counters and starts new ones."""
        counters, self._counters = self._counters, DecodeCounters()
        return counters

    def _fill(self) -> None:
        """Takes waiting requests for all free slots, prefills their prompts together, and starts them."""
        waves: list[tuple[Prompt, list[SlotRequest]]] = []
        while self._free and self._queue:
            request, slot = self._queue.popleft(), self._free.pop()
            self._tenants[slot] = _Tenant(request)
            if not waves or waves[-1][0].prompt_id != request.prompt.prompt_id:
                waves.append((request.prompt, []))
            waves[-1][1].append(_slot_request(request, slot))
        prefixes = self._prefixes_of([prompt for prompt, _ in waves])
        for prefix, (_, members) in zip(prefixes, waves, strict=True):
            self._state = self._engine.insert(prefix, self._state, members)
        if waves:
            self._prefix = (waves[-1][0].prompt_id, prefixes[-1])

    def _prefixes_of(self, prompts: Sequence[Prompt]) -> list[Prefix]:
        """Prefills all prompts but the first where that is the one whose group was begun before."""
        is_kept = bool(prompts) and self._prefix is not None and self._prefix[0] == prompts[0].prompt_id
        kept = [self._prefix[1]] if is_kept and self._prefix is not None else []
        new = prompts[len(kept) :]
        self._counters.num_prefills += len(new)
        self._counters.num_prefill_tokens += sum(len(prompt.token_ids) for prompt in new)
        return kept + (self._engine.prefill(self._params, [prompt.token_ids for prompt in new]) if new else [])

    def _vacate(self, slot: int) -> None:
        del self._tenants[slot]
        self._free.append(slot)

    def _completion(self, tenant: _Tenant) -> Completion:
        token_ids = np.concatenate(tenant.token_ids)
        is_stopped = int(token_ids[-1]) in self._engine.eos_token_ids
        return Completion(
            sample_index=tenant.request.sample_index,
            token_ids=token_ids,
            behaviour_logprobs=np.concatenate(tenant.logprobs),
            weight_versions=np.concatenate(tenant.weight_versions),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        )


def _slot_request(request: CompletionRequest, slot: int) -> SlotRequest:
    return SlotRequest(
        slot=slot,
        prompt_id=request.prompt.prompt_id,
        sample_index=request.sample_index,
        temperature=request.temperature,
        max_new_tokens=request.max_new_tokens,
    )
