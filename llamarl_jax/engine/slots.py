"""Continuous batching: keeps the slots of an engine full and puts finished completions together.

Requests wait in one queue, first come, first served. Before each `generate` call free slots are filled; requests of the same prompt on the
same replica share one prefill and, with the same weights, the rows that it was put into. A slot that ended is free again as soon as that is
known, so a long completion never holds up its neighbours' successors, as long as there is a free row for their prompt.
Running completions wait for at most one chunk of prefill between two decode calls; a long prompt is spread over several.

With `dispatch_ahead` calls the device is given its next work before the host has read the last results. A call therefore remembers who was
in which slot when it was dispatched, and with which weights.

Weights may be swapped between two calls. Tokens are stamped with the version that was in force when their call was dispatched. A
prefix that is kept for more requests, or half computed, belongs to the old weights and is dropped. The KV cache of running completions is
kept, or computed again with the new weights.

Between two calls that are both read, all there is can also be written down (`unfinished`) and taken up by another scheduler (`restart`),
which computes the caches again. A scheduler that goes on itself, and is to do bit for bit what the other one does, restarts likewise.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamarl_jax.engine.api import Engine, Mark, PendingResult, Prefilled, PrefillRequest, Prefix, ResultTokens, SlotRequest
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.seats import PromptRow, Seat, Seats
from llamarl_jax.models.transformer import Params
from llamarl_jax.types import Completion, FinishReason, Prompt


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One completion that is wanted; `ticket` comes back with it and means something to the caller only.

    Attributes:
        deadline_s: seconds after its prompt is in its slot at which it is cut off as it is, with the tokens of at least one decode call;
            a restart begins them anew. None for no limit. Only this makes a result depend on time.
    """

    ticket: int
    prompt: Prompt
    sample_index: int
    sampling: SamplingConfig
    max_new_tokens: int
    deadline_s: float | None = None


@dataclass
class DecodeCounters:
    """What the decoder has done since the counters were last taken.

    Attributes:
        num_slot_steps: decode steps × slots that were computed.
        num_kept_tokens: tokens that ended up in completions.
        num_prefills: prompts prefilled, once on each replica that they were wanted on, those computed again after a swap included.
        num_prefill_tokens: their tokens.
        num_aborted: completions cut off by a deadline or by the caller.
        prefill_s: seconds in which the device prefilled for a decode call, as the host saw it.
        decode_s: seconds in which it decoded.
        tail_s: seconds of those in calls that began with less than half of the slots live.
    """

    num_slot_steps: int = 0
    num_kept_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_aborted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tail_s: float = 0.0


@dataclass
class _Tenant:
    """A completion in its seat.

    Attributes:
        started_s: when its prompt was put into its slot.
        num_dispatched: decode steps that were asked for, read or not.
    """

    request: CompletionRequest
    seat: Seat
    started_s: float | None = None
    num_dispatched: int = 0
    token_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    weight_versions: list[np.ndarray] = field(default_factory=list)

    @property
    def num_emitted(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def may_be_live(self) -> bool:
        return self.num_dispatched < self.request.max_new_tokens

    def is_late(self, now_s: float) -> bool:
        limit_s = self.request.deadline_s
        return limit_s is not None and self.started_s is not None and now_s - self.started_s > limit_s

    def completion(self, reason: FinishReason) -> Completion:
        """Returns what it has emitted, as ended by `reason`."""
        return Completion(
            sample_index=self.request.sample_index,
            token_ids=np.concatenate([np.zeros(0, np.int32), *self.token_ids]),
            behaviour_logprobs=np.concatenate([np.zeros(0, np.float32), *self.logprobs]),
            weight_versions=np.concatenate([np.zeros(0, np.int32), *self.weight_versions]),
            finish_reason=reason,
        )

    def prefill_request(self) -> PrefillRequest:
        """Returns what computes its cache as far as it has come."""
        return PrefillRequest(np.concatenate([self.request.prompt.token_ids, *self.token_ids]), self.seat.row.replica)

    def slot_request(self) -> SlotRequest:
        """Returns what starts it, or goes on with it behind what it has emitted."""
        return SlotRequest(
            slot=self.seat.slot,
            prompt_row=self.seat.row.number,
            num_prompt_tokens=len(self.request.prompt.token_ids),
            prompt_id=self.request.prompt.prompt_id,
            sample_index=self.request.sample_index,
            sampling=self.request.sampling,
            max_new_tokens=self.request.max_new_tokens - self.num_emitted,
        )

    def num_tokens_after(self, num_steps: int) -> int:
        """Returns how long the completion can be when `num_steps` more steps have run."""
        return min(self.num_dispatched + num_steps, self.request.max_new_tokens)


@dataclass(frozen=True)
class _Call:
    """A dispatched decode call: its results, the weights it ran with, and the tenants it ran for.

    Attributes:
        prefilled: is there when what was prefilled before the call is; empty if nothing was.
        dispatched_s: when the first of all this was dispatched.
    """

    result: PendingResult
    version: int
    tenants: dict[int, _Tenant]
    prefilled: list[Mark]
    dispatched_s: float


@dataclass(frozen=True)
class _Family:
    """Completions of one prompt that start together on one replica, and the rows that the prompt has, there and elsewhere."""

    prompt: Prompt
    replica: int
    rows: list[PromptRow]
    members: list[_Tenant] = field(default_factory=list)


@dataclass(frozen=True)
class _Kept:
    """The prefixes of a prompt that has more requests in the queue, by their replica, and the rows that hold it."""

    prompt_id: int
    prefixes: dict[int, Prefix]
    rows: list[PromptRow]


@dataclass(frozen=True)
class _Wave:
    """Families that are being prefilled together: the work that is left, and who waits for it, in the order of the queue.

    If nothing was running when it began (`is_cold`), nobody is stalled by it, and it is not cut into chunks.
    """

    work: Iterator[Prefilled]
    is_cold: bool
    waiting: dict[int, _Family]

    def members(self) -> list[_Tenant]:
        """Returns those who wait, in the order of the queue."""
        return [member for _, family in sorted(self.waiting.items()) for member in family.members]


class SlotScheduler:
    """Drives one engine; not thread-safe, owned by the generator."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: int,
        *,
        dispatch_ahead: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts with all slots free.

        Args:
            engine: its compiled functions may be shared with other schedulers, its state is not.
            params: the weights in force.
            version: their version.
            dispatch_ahead: decode calls dispatched before the results of the last are read.
            clock: seconds, for deadlines and counters.
        """
        self._engine, self._dispatch_ahead, self._clock = engine, dispatch_ahead, clock
        self._params, self._version = params, version
        self._state = engine.init_decode_state()
        self._tenants: dict[int, _Tenant] = {}
        self._seats = self._all_seats()
        self._queue: deque[CompletionRequest] = deque()
        self._wave: _Wave | None = None
        self._kept: _Kept | None = None
        self._calls: deque[_Call] = deque()
        self._prefilled: list[Mark] = []  # of the turns since the last call was dispatched
        self._dispatched_s = self._read_s = clock()  # the first of these turns, and the end of the last reading
        self._finished: list[tuple[int, Completion]] = []
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
        """True when nothing runs, nothing waits and every completion was handed out."""
        return not (self._tenants or self._queue or self._wave or self._calls or self._finished)

    @property
    def num_vacancies(self) -> int:
        """Seats for other prompts that the queue does not fill yet; 0 or less means that new requests would wait."""
        return self._seats.num_vacant - len(self._queue)

    def submit(self, requests: Sequence[CompletionRequest]) -> None:
        """Queues completions; those of one prompt should come together so that they share its prefill."""
        self._queue.extend(requests)

    def step(self) -> list[tuple[int, Completion]]:
        """Fills free slots, dispatches one decode call, and returns the completions that are known to have ended, with their tickets."""
        self._fill()
        is_dispatched = any(tenant.may_be_live for tenant in self._tenants.values())
        if is_dispatched:
            self._dispatch()
        if self._calls and (len(self._calls) > self._dispatch_ahead or not is_dispatched):
            self._read(self._calls.popleft())
        now_s = self._clock()
        self._cut_off(lambda tenant: tenant.is_late(now_s), FinishReason.DEADLINE)
        finished, self._finished = self._finished, []
        return finished

    def swap_weights(self, params: Params, version: int, *, recomputes_cache: bool = False) -> None:
        """Puts new weights in force for all later calls.

        Args:
            params: the new weights.
            version: their version.
            recomputes_cache: computes the KV cache of running completions again with the new weights; otherwise they go on with their
                old one.
        """
        self._params, self._version = params, version
        self._kept = None
        if self._wave is not None:
            self._restart_wave(self._wave)
        if recomputes_cache:
            self._recompute_cache()

    def abort(self, tickets: Collection[int]) -> None:
        """Ends completions as they are, with all that was dispatched for them; the next `step` returns them with the reason `aborted`.

        Those that had not started have no tokens.
        """
        wanted = set(tickets)
        if self._wave is not None and any(tenant.request.ticket in wanted for tenant in self._wave.members()):
            self._restart_wave(self._wave)
        for request in [request for request in self._queue if request.ticket in wanted]:
            self._queue.remove(request)
            self._finish(request, _not_started(request))
        self._cut_off(lambda tenant: tenant.request.ticket in wanted, FinishReason.ABORTED)

    def settle(self) -> list[tuple[int, Completion]]:
        """Reads every call that was dispatched, dispatches none, and returns what has ended as `step` does."""
        self._read_all()
        finished, self._finished = self._finished, []
        return finished

    def unfinished(self) -> list[tuple[int, Completion]]:
        """Returns what runs, by slot, and then what waits, with their tickets: each as `abort` would end it, but it goes on.

        Those that run have at least one token each, after `settle`; those that wait have none.
        """
        seated = [tenant for _, tenant in sorted(self._tenants.items())] + (self._wave.members() if self._wave else [])
        known = [(tenant.request.ticket, tenant.completion(FinishReason.ABORTED)) for tenant in seated]
        return known + [(request.ticket, _not_started(request)) for request in self._queue]

    def restart(self, unfinished: Sequence[tuple[int, Completion]], request_of: Callable[[int, int], CompletionRequest]) -> None:
        """Forgets everything but the weights and goes on with what `unfinished` returned, here or in another scheduler, after `settle`.

        What runs takes the first seats, in new KV caches that the weights in force compute; with fewer seats than it had, the rest
        begins again.

        Args:
            request_of: (ticket, sample index) → the request.
        """
        assert not self._calls, "settle() reads the calls first"
        assert not self._finished, "settle() hands out what has ended first"
        self._wave, self._kept = None, None
        self._tenants.clear()
        self._queue.clear()
        self._state, self._seats = self._engine.init_decode_state(), self._all_seats()
        rows: dict[int, list[PromptRow]] = {}
        for ticket, known in unfinished:
            request = request_of(ticket, known.sample_index)
            seat = self._seats.take(rows.setdefault(request.prompt.prompt_id, [])) if len(known.token_ids) else None
            if seat is None:
                self._queue.append(request)
                continue
            pieces = [known.token_ids], [known.behaviour_logprobs], [known.weight_versions]
            self._tenants[seat.slot] = _Tenant(request, seat, None, 0, *pieces)
        self._recompute_cache()

    def take_counters(self) -> DecodeCounters:
        """Returns the counters and starts new ones."""
        counters, self._counters = self._counters, DecodeCounters()
        return counters

    def _all_seats(self) -> Seats:
        engine = self._engine
        return Seats(
            num_slots=engine.num_slots,
            num_prompt_rows=engine.num_prompt_rows,
            most_members=engine.most_members,
            num_replicas=engine.num_replicas,
        )

    def _fill(self) -> None:
        """Gives free slots to waiting requests; prefills one chunk if completions are running, else all that is waiting."""
        self._start_kept()
        if self._wave is None:
            self._wave = self._next_wave()
        while (wave := self._wave) is not None:
            for number, prefix in self._take_turn(wave.work).items():
                family = wave.waiting.pop(number)
                self._start(prefix, family.members)
                self._keep(prefix, family)
            self._start_kept()  # in slots that came free during the prefill
            if not wave.waiting:
                self._wave = None
            if not wave.is_cold:
                return

    def _take_turn(self, work: Iterator[Prefilled]) -> dict[int, Prefix]:
        prefixes, mark = next(work)
        if not self._prefilled:
            self._dispatched_s = self._clock()
        self._prefilled.append(mark)
        return prefixes

    def _keep(self, prefix: Prefix, family: _Family) -> None:
        """Keeps a prefix if siblings of the family come next, beside those that they have on other replicas."""
        if not self._is_next(family.prompt.prompt_id):
            return
        if self._kept is None or self._kept.rows is not family.rows:
            self._kept = _Kept(family.prompt.prompt_id, {}, family.rows)
        self._kept.prefixes[prefix.replica] = prefix

    def _start_kept(self) -> None:
        """Starts requests whose prompt was prefilled for their siblings."""
        if (kept := self._kept) is None:
            return
        members: dict[int, list[_Tenant]] = {}
        while self._is_next(kept.prompt_id) and (tenant := self._seat_next(kept.rows, kept.prefixes)):
            members.setdefault(tenant.seat.row.replica, []).append(tenant)
        for replica, tenants in members.items():
            self._start(kept.prefixes[replica], tenants)
        if not self._is_next(kept.prompt_id):
            self._kept = None

    def _is_next(self, prompt_id: int) -> bool:
        return bool(self._queue) and self._queue[0].prompt.prompt_id == prompt_id

    def _seat_next(self, rows: list[PromptRow], replicas: Collection[int] | None = None) -> _Tenant | None:
        """Gives a seat to the first request of the queue, whose prompt is in `rows`; returns None if it has to wait.

        Args:
            replicas: where the seat may be; None for anywhere.
        """
        seat = self._seats.take(rows, replicas)
        return None if seat is None else _Tenant(self._queue.popleft(), seat)

    def _next_wave(self) -> _Wave | None:
        families: list[_Family] = []
        while self._queue:
            prompt = self._queue[0].prompt
            is_sibling = bool(families) and families[-1].prompt.prompt_id == prompt.prompt_id
            rows = families[-1].rows if is_sibling else []
            if (tenant := self._seat_next(rows)) is None:
                break
            replica = tenant.seat.row.replica
            if not is_sibling or families[-1].replica != replica:
                families.append(_Family(prompt, replica, rows))
            families[-1].members.append(tenant)
        if not families:
            return None
        work = self._prefill([PrefillRequest(family.prompt.token_ids, family.replica) for family in families])
        return _Wave(work, not self._tenants, dict(enumerate(families)))

    def _prefill(self, requests: Sequence[PrefillRequest]) -> Iterator[Prefilled]:
        self._counters.num_prefills += len(requests)
        self._counters.num_prefill_tokens += sum(len(request.token_ids) for request in requests)
        return self._engine.prefill(self._params, requests)

    def _start(self, prefix: Prefix, members: Sequence[_Tenant]) -> None:
        for tenant in members:
            tenant.started_s = self._clock() if tenant.started_s is None else tenant.started_s
        self._tenants |= {tenant.seat.slot: tenant for tenant in members}
        self._fit()
        self._state = self._engine.bulk_insert(prefix, self._state, [tenant.slot_request() for tenant in members])

    def _restart_wave(self, wave: _Wave) -> None:
        """Puts those who wait back to the head of the queue."""
        waiting = wave.members()
        for tenant in reversed(waiting):
            self._seats.leave(tenant.seat)
            self._queue.appendleft(tenant.request)
        self._wave = None

    def _fit(self) -> None:
        """Makes the caches as long as what runs needs for one more call."""
        running, num_steps = self._tenants.values(), self._engine.num_steps_per_call
        num_prompt_tokens = max(len(tenant.request.prompt.token_ids) for tenant in running)
        self._state = self._engine.fit(self._state, num_prompt_tokens, max(tenant.num_tokens_after(num_steps) for tenant in running))

    def _dispatch(self) -> None:
        self._fit()
        is_truncated = any(tenant.request.sampling.is_truncated for tenant in self._tenants.values())
        self._state, result = self._engine.generate(self._params, self._state, is_truncated=is_truncated)
        for tenant in self._tenants.values():
            tenant.num_dispatched += self._engine.num_steps_per_call
        dispatched_s = self._dispatched_s if self._prefilled else self._clock()
        self._calls.append(_Call(result, self._version, dict(self._tenants), self._prefilled, dispatched_s))
        self._prefilled = []

    def _read(self, call: _Call) -> None:
        result = self._wait_for(call)
        for slot, tenant in sorted(call.tenants.items()):
            if self._tenants.get(slot) is not tenant:
                continue  # it had ended before this call; the call emitted nothing for it
            self._append(tenant, slot, result, call.version)
            if not result.is_live[slot]:
                self._vacate(slot)
                is_stopped = int(tenant.token_ids[-1][-1]) in self._engine.eos_token_ids
                self._finish(tenant.request, tenant.completion(FinishReason.STOP if is_stopped else FinishReason.LENGTH))

    def _wait_for(self, call: _Call) -> ResultTokens:
        """Returns the results, and counts how long the device prefilled and decoded since it was free for this call."""
        prefill_began_s = decode_began_s = max(call.dispatched_s, self._read_s)
        if call.prefilled:
            for mark in call.prefilled:
                mark.block_until_ready()
            decode_began_s = max(self._clock(), prefill_began_s)
        result = call.result.to_host()
        self._read_s = self._clock()
        decode_s = self._read_s - decode_began_s
        self._counters.num_slot_steps += result.token_ids.size
        self._counters.prefill_s += decode_began_s - prefill_began_s
        self._counters.decode_s += decode_s
        if 2 * np.count_nonzero(result.is_emitted[0]) < self._engine.num_slots:
            self._counters.tail_s += decode_s
        return result

    def _read_all(self) -> None:
        while self._calls:
            self._read(self._calls.popleft())

    def _append(self, tenant: _Tenant, slot: int, result: ResultTokens, version: int) -> None:
        num_emitted = int(result.is_emitted[:, slot].sum())
        tenant.token_ids.append(result.token_ids[:num_emitted, slot])
        tenant.logprobs.append(result.logprobs[:num_emitted, slot])
        tenant.weight_versions.append(np.full(num_emitted, version, np.int32))
        self._counters.num_kept_tokens += num_emitted

    def _cut_off(self, is_chosen: Callable[[_Tenant], bool], reason: FinishReason) -> None:
        """Ends running completions, after reading what is on its way for them, which may end some by itself."""
        if not any(map(is_chosen, self._tenants.values())):
            return
        self._read_all()
        slots = [slot for slot, tenant in self._tenants.items() if is_chosen(tenant)]
        if not slots:
            return
        self._state = self._engine.release(self._state, slots)
        for slot in slots:
            tenant = self._tenants[slot]
            self._vacate(slot)
            self._finish(tenant.request, tenant.completion(reason))

    def _recompute_cache(self) -> None:
        """Prefills every running completion as far as it has come, with the weights in force, into the slot that it has."""
        self._read_all()
        running = [tenant for _, tenant in sorted(self._tenants.items())]
        work = self._prefill([tenant.prefill_request() for tenant in running])
        num_left = len(running)
        while num_left:
            for number, prefix in self._take_turn(work).items():
                running[number].num_dispatched = running[number].num_emitted
                self._start(prefix, [running[number]])
                num_left -= 1

    def _vacate(self, slot: int) -> None:
        self._seats.leave(self._tenants.pop(slot).seat)

    def _finish(self, request: CompletionRequest, completion: Completion) -> None:
        if completion.finish_reason in (FinishReason.ABORTED, FinishReason.DEADLINE):
            self._counters.num_aborted += 1
        self._finished.append((request.ticket, completion))


def _not_started(request: CompletionRequest) -> Completion:
    """Returns a completion without tokens, as an abort ends one that waits."""
    return Completion(
        sample_index=request.sample_index,
        token_ids=np.zeros(0, np.int32),
        behaviour_logprobs=np.zeros(0, np.float32),
        weight_versions=np.zeros(0, np.int32),
        finish_reason=FinishReason.ABORTED,
    )
