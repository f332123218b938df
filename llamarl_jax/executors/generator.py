"""The generator: draws prompts as the schedule admits them, decodes their completions, and loads new weights.

Two loops over the same parts. In `boundary` mode it works in rounds, each with a weight version of its own that its number fixes: as soon
as a round is full it waits for the rewards, closes the round, loads the next weights, and goes on. Completions that are not at their end
by then (partial rollouts) stay in their slots. The schedule is told after each decode call what has ended in it, so that a run is
reproducible. In `in_flight` mode it never waits for rewards: before every decode call it takes the newest weights, admits what the
staleness bound allows, and goes on. A completion may span versions, each token carrying its own.

Where a checkpoint is due, `boundary` mode writes down what is unfinished when the round begins whose weights the checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from llamarl_jax.channels import Channel
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.engine.api import Engine
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.schedule import SharedSchedule
from llamarl_jax.types import Completion, CompletionGroup, Prompt
from llamarl_jax.unfinished import Unfinished
from llamarl_jax.weights.channel import WeightChannel, WeightUpdate

POLL_S = 0.05
"""How long the generator sleeps on one source (weights, schedule) before it looks at the other one."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Sampling of training completions."""

    temperature: float = 1.0
    """Sampling temperature; the trainer takes π at the same one."""
    top_k: int = 0
    """Only 0 (off): the trainer's π is the whole softmax, and a truncated μ would make every ratio π/μ wrong."""
    top_p: float = 1.0
    """Only 1 (off), see top_k."""
    min_p: float = 0.0
    """Only 0 (off), see top_k."""
    kv_after_update: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of running completions when new weights are swapped in (mode `in_flight` and partial rollouts): kept,
    as computed by the old weights, or computed again, which costs a prefill of all that is running,
    during which none of it goes on."""
    completion_deadline_s: float | None = None
    """Seconds after which a completion is cut off as it is; it is trained on and counted as truncated. A run is then not reproducible."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"generator.temperature is {self.temperature}; training needs a temperature above 0 (greedy groups teach nothing)"
            )
        if self.sampling.is_truncated:
            raise ValueError(
                f"generator.top_k = {self.top_k}, top_p = {self.top_p}, min_p = {self.min_p}: training does not reproduce a truncated "
                "distribution, so log-probs of π and μ would belong to different ones; set them to 0, 1 and 0 (evaluation may truncate)"
            )
        if self.completion_deadline_s is not None and self.completion_deadline_s <= 0:
            raise ValueError(f"generator.completion_deadline_s is {self.completion_deadline_s}; it must be above 0, or None for no limit")

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution as the decoder takes it."""
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass
class _OpenGroup:
    """A group that is being decoded."""

    prompt: Prompt
    admission_index: int
    version_class: int
    completions: list[Completion] = field(default_factory=list)


class Generator:
    """One executor on the generator mesh; everything runs on its own thread."""

    def __init__(
        self,
        *,
        config: GeneratorConfig,
        engine: Engine,
        max_new_tokens: int,
        dispatch_ahead: int,
        schedule: SharedSchedule,
        cursor: PromptCursor,
        weights: WeightChannel,
        completions: Channel[CompletionGroup],
        timeline: Timeline,
        counters: Counters,
        heartbeat: Callable[[], None],
        evaluate: Callable[[SlotScheduler], None] | None = None,
        resumed: Unfinished | None = None,
        unfinished: Channel[Unfinished] | None = None,
        is_checkpoint_due: Callable[[int], bool] = lambda _step: False,
    ) -> None:
        """Joins the parts.

        Args:
            evaluate: called with the idle slots when the first and when the last weights are loaded, None for no evaluation.
            heartbeat: called whenever progress was made.
            resumed: what was unfinished at the checkpoint that the run goes on from.
            unfinished: where to put what is unfinished when a checkpoint of it is due.
            is_checkpoint_due: says so of a number of committed steps.
        """
        self._config, self._engine = config, engine
        self._max_new_tokens, self._dispatch_ahead = max_new_tokens, dispatch_ahead
        self._schedule, self._cursor, self._weights, self._completions = schedule, cursor, weights, completions
        self._timeline, self._counters, self._heartbeat, self._evaluate = timeline, counters, heartbeat, evaluate
        self._resumed, self._unfinished, self._is_checkpoint_due = resumed, unfinished, is_checkpoint_due
        self._open: dict[int, _OpenGroup] = {}
        self._slots: SlotScheduler | None = None

    def run(self) -> None:
        """Generates until the schedule needs no more groups, then evaluates the final weights if asked to."""
        first = self._wait_for_weights()
        self._slots = SlotScheduler(self._engine, first.params, first.version, dispatch_ahead=self._dispatch_ahead)
        del first  # the slots hold the only reference, so that old weights are freed at the next swap
        if self._evaluate and self._slots.version == 0:
            self._evaluate(self._slots)
        if self._schedule.config.mode == "boundary":
            self._generate_rounds(self._slots)
        else:
            self._generate_in_flight(self._slots)
        while self._slots.version < self._schedule.config.num_steps and self._evaluate:
            self._load(self._slots, self._wait_for_weights())
        if self._evaluate:
            self._evaluate(self._slots)

    def _generate_rounds(self, slots: SlotScheduler) -> None:
        schedule, num_rounds = self._schedule, self._schedule.config.num_steps
        record = self._resumed
        for group in record.groups if record else ():
            self._open[group.admission_index] = _OpenGroup(
                group.prompt, group.admission_index, group.version_class, list(group.completions)
            )
        for round_index in range(schedule.open_round, num_rounds):
            while slots.version < schedule.round_version(round_index):
                self._load(slots, self._wait_for_weights())
            if record is not None:  # after it was written as after it was read, so that a resumed run does the same from here on
                slots.restart(record.running, self._request)
            while not self._close_round(slots):
                self._admit_all(slots)
                self._decode(slots)
            self._count_carried(slots)
            step = round_index + 1 - schedule.config.round_lag
            is_due = step > schedule.start_version and self._is_checkpoint_due(step)
            record = self._write_down(slots) if is_due else None
            self._heartbeat()
        self._write_down(slots)  # for checkpoints of versions that no round is sampled with

    def _close_round(self, slots: SlotScheduler) -> bool:
        """Closes the open round if it is full, which needs all rewards; returns False if it has to go on."""
        if not self._schedule.is_round_full:
            return False
        self._collect(slots.settle())
        self._count(slots)
        self._heartbeat()
        with self._timeline.wait("generator", "rewards"):
            self._schedule.wait_until(lambda schedule: schedule.is_round_judged)
        return self._schedule.close_round()

    def _count_carried(self, slots: SlotScheduler) -> None:
        """Counts the completions that are carried from one round into the next, and what they have so far."""
        num_tokens = [len(completion.token_ids) for _, completion in slots.unfinished()]
        self._counters.add(carried=sum(n > 0 for n in num_tokens), carried_tokens=sum(num_tokens))

    def _write_down(self, slots: SlotScheduler) -> Unfinished | None:
        """Puts what is unfinished as the open round begins where the trainer finds it for its checkpoint, and returns it."""
        if self._unfinished is None:
            return None
        record = Unfinished(
            schedule=self._schedule.round_start(),
            cursor=self._cursor.undrawn(),
            groups=tuple(map(_to_group, self._open.values())),
            running=tuple(slots.unfinished()),
        )
        self._unfinished.put(record)
        return record

    def _generate_in_flight(self, slots: SlotScheduler) -> None:
        while not self._schedule.is_exhausted:
            if (update := self._weights.take_newest()) is not None:
                self._load(slots, update)
            self._admit_all(slots)
            if not slots.is_idle:
                self._decode(slots)
                continue
            with self._timeline.wait("generator", "weights"):
                update = self._weights.take(timeout_s=POLL_S)
            if update is not None:
                self._load(slots, update)
        while not slots.is_idle:  # a call that was dispatched ahead, of completions that had all ended
            self._decode(slots)

    def _admit_all(self, slots: SlotScheduler) -> None:
        """Admits groups until every slot has a completion or the schedule allows no more."""
        while slots.num_vacancies > 0 and self._schedule.num_admissible(slots.version) > 0:
            self._admit(slots)

    def _admit(self, slots: SlotScheduler) -> None:
        admission = self._schedule.admit(slots.version)
        index = admission.admission_index
        prompt = self._cursor.draw(index)
        self._open[index] = _OpenGroup(prompt, index, admission.version_class)
        slots.submit([self._request(index, sample) for sample in range(self._schedule.config.group_size)])

    def _request(self, admission_index: int, sample_index: int) -> CompletionRequest:
        return CompletionRequest(
            ticket=admission_index,
            prompt=self._open[admission_index].prompt,
            sample_index=sample_index,
            sampling=self._config.sampling,
            max_new_tokens=self._max_new_tokens,
            deadline_s=self._config.completion_deadline_s,
        )

    def _decode(self, slots: SlotScheduler) -> None:
        with self._timeline.span("generator", "decode"):
            finished = slots.step()
        self._count(slots)
        self._collect(finished)
        self._heartbeat()

    def _count(self, slots: SlotScheduler) -> None:
        counters = slots.take_counters()
        self._counters.add(
            generated_tokens=counters.num_kept_tokens,
            slot_steps=counters.num_slot_steps,
            prefill_tokens=counters.num_prefill_tokens,
            aborted=counters.num_aborted,
            prefill_s=counters.prefill_s,
            decode_s=counters.decode_s,
            tail_s=counters.tail_s,
        )

    def _collect(self, finished: list[tuple[int, Completion]]) -> None:
        """Hands on the groups that are whole by what one call has ended."""
        whole = []
        for index, completion in finished:
            group = self._open[index]
            group.completions.append(completion)
            if len(group.completions) == self._schedule.config.group_size:
                whole.append(self._open.pop(index))
        if self._schedule.config.mode == "boundary":
            self._schedule.mark_sampled([group.admission_index for group in whole])
        for group in whole:
            self._emit(group)

    def _emit(self, group: _OpenGroup) -> None:
        with self._timeline.wait("generator", "reward queue"):
            self._completions.put(_to_group(group))

    def _wait_for_weights(self) -> WeightUpdate:
        with self._timeline.wait("generator", "weights"):
            update = self._weights.take()
        assert update is not None, "take without a time limit returns an update or raises"
        return update

    def _load(self, slots: SlotScheduler, update: WeightUpdate) -> None:
        with self._timeline.span("generator", "swap"):
            slots.swap_weights(update.params, update.version, recomputes_cache=self._config.kv_after_update == "recompute")
        self._heartbeat()


def _to_group(group: _OpenGroup) -> CompletionGroup:
    """Returns what has ended of a group, in the order of its samples."""
    return CompletionGroup(
        prompt=group.prompt,
        admission_index=group.admission_index,
        version_class=group.version_class,
        completions=tuple(sorted(group.completions, key=lambda c: c.sample_index)),
    )
