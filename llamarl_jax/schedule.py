"""Which prompt groups may start and which are trained on next, so that no token is ever older than a bound and nothing is thrown away.

**The setting.** Version v of the weights is the outcome of v optimizer steps. Step k trains on B = `groups_per_step` groups and commits
version k + 1. A group is *admitted* when its first completion starts; its *class* is the version that the generator has loaded at that
moment. Weights only get newer while a group is generated, so the class is the age of its oldest token, and a group of class c that is
trained on at step k has staleness at most k − c. The bound is S = `max_staleness`. A group that is filtered out or whose reward fails
is *dropped*: its place is given back. An *outstanding* group was admitted and is neither consumed nor dropped. With
live = admitted − dropped, the outstanding groups at step k number live − k·B.

**Admission rule.** A group may start only while live < (u + S + 1)·B, where u is the version *loaded by the generator* (the smallest one
where replicas differ). The trainer's version would be wrong: it may be ahead of what the generator has loaded, and a group that the
rule lets in for a new version would be sampled with an old one.

**Batching rule.** Batch k may be any B completed groups that leave at most max(0, j + S − k)·B outstanding groups of class ≤ j, for
every j. For j = k − S this is zero: a group that is due cannot wait for another step, so the trainer waits for it instead. Younger
groups may overtake older ones as long as the steps that remain have room for those left behind.

**Claim.** Throughout step k (from the moment batch k − 1 is taken until batch k is), for every j,

    outstanding groups of class ≤ j  ≤  max(0, j + S + 1 − k)·B.                                            (*)

Read for j = k − S − 1 it says that nothing older than the bound exists. The proof is by induction over the events of a run:

- *Start.* Nothing is outstanding. (A run that resumes at version v starts with live = v·B and k = v: nothing is outstanding either.)
- *Admission* of a group of class u changes the count for j ≥ u only. Afterwards live ≤ (u + S + 1)·B, hence all outstanding groups
  together, of whatever class, are at most (u + S + 1 − k)·B ≤ (j + S + 1 − k)·B. Nothing is assumed about the order of versions, so
  a replica that comes back with old weights does no harm.
- *Completion and loading* change no count, *dropping* lowers them (and lowers live by as much).
- *Taking batch k* turns k into k + 1, and the batching rule is (*) for k + 1, word for word.

**There is always progress.** *A legal batch exists once everything outstanding is completed and there are B groups of it:* take oldest
classes first. If c groups have class ≤ j then max(0, c − B) remain, at most max(0, (j + S + 1 − k)·B − B), as the rule asks.
*And B groups can always be had:* as long as fewer are outstanding, live < (k + 1)·B ≤ (u + S + 1)·B for any u ≥ k − S, so admission is
open as soon as the generator has loaded version k − S, which was committed before step k began. Nothing is discarded for its age: by (*)
nothing gets too old. S = 0 is synchronous on-policy training: round k is admitted after version k is loaded.

**Why not simply the groups that completed first?** Take B = 2, S = 2. Version 0 admits six groups; step 0 trains on two of them;
version 1 is loaded and admits two groups of class 1. These finish first, and step 1 takes them. Now four groups of class 0 are left,
all due at step 2, which has room for two: the others are trained on at staleness 3, or thrown away, or wait forever.

**Two orders** (`mode`). Both obey the batching rule.

- `in_flight`: completion order, except that places are kept for groups that are needed. If need(j) of the groups of class ≤ j must go
  into this batch (what exceeds the allowance of the rule), at most B − need(j) places may go to classes > j. One pass over the completed
  groups in completion order takes each group that keeps all these limits. The limits are nested, so that the pass fills the batch
  whenever any choice could (a greedy pass over a laminar matroid), with the earliest completions.
- `boundary`: reproducible, in rounds. Let C = `partial_rollout_rounds` ≤ S. Round k is sampled with exactly version
  max(start, k − (S − C)), admits groups while live < (k + C + 1)·B, and ends with the choice of batch k. It is *full* as soon as at
  least B groups that are in no batch yet are sampled to the end, and of those still running at most max(0, j + S − k)·B have class ≤ j,
  for every j. Then nothing is decoded until all that is sampled has its reward. Dropped groups give their places back now, not
  earlier; if the round is full without them too, batch k is the B lowest admission indices of what is sampled, and round k + 1 begins;
  else round k goes on. Groups that are still running keep their slots and go on under the next round's weights: the *partial rollouts*
  of the LlamaRL paper (arXiv 2505.24034). A group is in the batch of the round that admitted it, or of one of the C rounds after it
  (or up to round start + S, as long as all weights are the first ones): S is divided between C and the S − C rounds by which the
  weights of a round lag behind it while the trainer works.

  The proof is the one above, with the open round in place of the step, and with *outstanding* for the groups that are in no batch.
  The admission rule holds by itself: with u ≥ k − S + C, live ≤ (k + C + 1)·B ≤ (u + S + 1)·B. The choice obeys the batching rule: classes
  do not fall from one admission to the next, so where a sampled group of class ≤ j is left over, all B chosen ones are of class ≤ j, and
  (*) minus B is the rule; where none is, what is left of class ≤ j is running, and fullness is the rule. There is progress: with nothing
  running and B groups sampled a round is full, with fewer its admission is open. Batch k is trained on at step k, so staleness is at
  most k − c ≤ S as before. And a run is reproducible, as long as the sampler reports after each decode call which groups have ended in
  it: when a round is full, who is admitted where, and what a batch holds follow from these reports and from what is dropped, never
  from when a reward, the trainer or weights arrive. With C = 0 a round ends when each of its own B groups is sampled and none is
  missing. The price is that the last reward of a round is waited for before the next one starts; `in_flight` does not pay it.

`Schedule` is plain bookkeeping without threads or clock, so that a simulator can drive it as well as a run; `SharedSchedule` puts a lock
and a way to wait around it. A call costs at most O(outstanding), and outstanding ≤ (S + 1)·B.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llamarl_jax.channels import Monitor


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How many groups a step takes and how old they may be."""

    num_steps: int = 100
    """Optimizer steps of the whole run, those before a resume included."""
    groups_per_step: int = 8
    """Prompt groups in a batch (B)."""
    group_size: int = 8
    """Completions sampled for each prompt (G)."""
    max_staleness: int = 1
    """Optimizer steps by which a token may lag behind the weights that it trains (S); 0 is synchronous on-policy training."""
    mode: Literal["boundary", "in_flight"] = "boundary"
    """`boundary`: weights change between rounds, reproducible; `in_flight`: weights change between decode calls, faster."""
    partial_rollout_rounds: int = 0
    """Rounds over which an unfinished completion may be carried on in `boundary` mode (C), at most S; 0 finishes all of a round. Weights
    then lag behind by S − C rounds only: with C = S the trainer and the decoder take turns."""
    max_dropped_batches: int = 20
    """The run ends with an error when more than this many times `groups_per_step` groups are dropped between two batches."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "groups_per_step", "group_size", "max_dropped_batches"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"schedule.{name} is {value}; it must be at least 1")
        if self.max_staleness < 0:
            raise ValueError(f"schedule.max_staleness is {self.max_staleness}; it must be 0 (synchronous) or more")
        if self.mode not in {"boundary", "in_flight"}:
            raise ValueError(f"schedule.mode is {self.mode!r}; choose 'boundary' or 'in_flight'")
        self._check_partial_rollouts()

    @property
    def most_completions(self) -> int:
        """Completions that can be unfinished at once.

        In `boundary` mode all rounds before the open one are sampled, and C rounds after it may be begun; in `in_flight` mode S + 1 batches
        may be admitted beyond the trained ones.
        """
        rounds = self.partial_rollout_rounds if self.mode == "boundary" else self.max_staleness
        return (rounds + 1) * self.groups_per_step * self.group_size

    @property
    def round_lag(self) -> int:
        """Versions by which the weights of a `boundary` round lag behind its number once the run is under way: S − C."""
        return self.max_staleness - self.partial_rollout_rounds

    def _check_partial_rollouts(self) -> None:
        rounds = self.partial_rollout_rounds
        if rounds < 0:
            raise ValueError(f"schedule.partial_rollout_rounds is {rounds}; it must be 0 (every round finishes its completions) or more")
        if rounds > self.max_staleness:
            raise ValueError(
                f"schedule.partial_rollout_rounds = {rounds} exceeds schedule.max_staleness = {self.max_staleness}: a completion carried "
                f"over {rounds} rounds has tokens at least that old; lower partial_rollout_rounds to {self.max_staleness} or raise "
                "max_staleness"
            )
        if rounds and self.mode == "in_flight":
            raise ValueError(
                f"schedule.partial_rollout_rounds = {rounds} has no meaning in mode 'in_flight', which has no rounds and always carries on "
                "unfinished completions; set it to 0 or schedule.mode to 'boundary'"
            )


class StalenessError(RuntimeError):
    """A batch holds a token older than the bound: a mistake in the schedule or in the versions it was told."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Permission to start one group: how many were admitted before it, and the loaded weight version it is bound to."""

    admission_index: int
    version_class: int


@dataclass(frozen=True, kw_only=True)
class ScheduleState:
    """Counts for metrics and logs; all but the last are totals since version 0, or since the counts given at a resume.

    `num_completed` includes the consumed groups. `outstanding_by_class` maps a version class to its outstanding groups.
    """

    step: int
    num_admitted: int
    num_completed: int
    num_dropped: int
    num_consumed: int
    outstanding_by_class: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class RoundStart:
    """A `boundary` schedule as a round begins, which is all that a resumed run needs of it.

    Attributes:
        round_index: the round.
        num_dropped: groups dropped since the run began.
        batches: those that earlier rounds chose and nobody has taken, the last one that of round `round_index` − 1.
        class_of: version class of each outstanding group, these batches included.
        completed: outstanding groups in no batch that are sampled and have their reward.
    """

    round_index: int
    num_dropped: int
    batches: tuple[tuple[int, ...], ...]
    class_of: Mapping[int, int]
    completed: tuple[int, ...]

    def at_step(self, step: int) -> RoundStart:
        """Returns it without the batches before batch `step`."""
        kept = self.round_index - step
        gone = {index for batch in self.batches[: len(self.batches) - kept] for index in batch}
        class_of = {index: version for index, version in self.class_of.items() if index not in gone}
        return replace(self, batches=self.batches[len(self.batches) - kept :], class_of=class_of)


def check_staleness(*, step: int, oldest_version: int, max_staleness: int, what: str) -> None:
    """Raises `StalenessError` if step − oldest_version > max_staleness; `what` names the data in the message."""
    if step - oldest_version > max_staleness:
        raise StalenessError(
            f"{what} has a token of version {oldest_version} at step {step}: staleness {step - oldest_version} exceeds max_staleness = "
            f"{max_staleness}; the generator must pass the version it has loaded (the smallest over replicas) when it admits a group"
        )


class Schedule:
    """Admits, completes, drops and batches groups; not thread-safe (see `SharedSchedule`).

    Args:
        config: batch size, bound, mode and length of the run.
        start_version: optimizer steps already committed; steps and versions go on from here and start_version·B groups count as consumed.
        start_dropped: groups dropped before a resume; admission indices go on at start_version·B + start_dropped.
        round_start: what was outstanding when a run is resumed amid its rounds (`boundary`); it says what was dropped as well.

    Raises:
        ValueError: start_version is outside the run, start_dropped is negative, or round_start does not begin at start_version.
    """

    def __init__(
        self, config: ScheduleConfig, *, start_version: int = 0, start_dropped: int = 0, round_start: RoundStart | None = None
    ) -> None:
        if not 0 <= start_version <= config.num_steps:
            raise ValueError(
                f"start_version {start_version} is outside 0 … num_steps = {config.num_steps}; raise schedule.num_steps to go on"
            )
        if start_dropped < 0:
            raise ValueError(f"start_dropped is {start_dropped}; it is a count and cannot be negative")
        if round_start is not None and round_start.round_index - len(round_start.batches) != start_version:
            raise ValueError(
                f"round {round_start.round_index} begins with {len(round_start.batches)} batches that wait, the first of them not batch "
                f"{start_version} = start_version; cut it with RoundStart.at_step({start_version})"
            )
        self.config = config
        self.start_version = start_version
        begin = round_start or RoundStart(round_index=start_version, num_dropped=start_dropped, batches=(), class_of={}, completed=())
        self._step = start_version
        self._dropped = begin.num_dropped
        self._dropped_since_batch = 0
        self._class_of: dict[int, int] = dict(begin.class_of)  # outstanding groups, in admission order
        self._completed: dict[int, None] = {}  # those of them that are completed, in completion order
        self._admitted = start_version * config.groups_per_step + len(self._class_of) + self._dropped
        # boundary mode only:
        self._round = begin.round_index
        self._sampled: set[int] = set(begin.completed)  # groups that are sampled to the end and in no batch
        self._rejected: set[int] = set()  # those of them that are dropped and have not yet given back their place
        self._batches = deque(begin.batches)  # chosen and not taken
        self._completed |= dict.fromkeys([*(index for batch in begin.batches for index in batch), *begin.completed])

    @property
    def step(self) -> int:
        """Returns the number of the next batch."""
        return self._step

    @property
    def is_finished(self) -> bool:
        """Tells whether every batch of the run was taken."""
        return self._step == self.config.num_steps

    @property
    def is_exhausted(self) -> bool:
        """Tells whether no group will be admitted any more: all that the run needs are completed, so that none can be dropped."""
        num_needed = self.config.num_steps * self.config.groups_per_step
        return self._round >= self.config.num_steps or (self._live == num_needed and len(self._completed) == len(self._class_of))

    @property
    def is_batch_ready(self) -> bool:
        """Tells whether `next_batch` would return a batch."""
        return not self.is_finished and self._choose() is not None

    @property
    def open_round(self) -> int:
        """Returns the round that is being sampled; num_steps after the last one.

        Raises:
            ValueError: the mode is `in_flight`, which has no rounds.
        """
        self._check_has_rounds("open_round")
        return self._round

    @property
    def is_round_full(self) -> bool:
        """Tells whether enough groups are sampled to the end to close the open round, if none of them is dropped.

        Raises:
            ValueError: the mode is `in_flight`, which has no rounds.
        """
        self._check_has_rounds("is_round_full")
        config = self.config
        if self._round >= config.num_steps or len(self._sampled) < config.groups_per_step:
            return False
        chosen = {index for batch in self._batches for index in batch}
        running = Counter(v for index, v in self._class_of.items() if index not in self._sampled and index not in chosen)
        num_running = 0
        for version, count in sorted(running.items()):
            num_running += count
            if num_running > max(0, version + config.max_staleness - self._round) * config.groups_per_step:
                return False
        return True

    @property
    def is_round_judged(self) -> bool:
        """Tells whether all groups that are sampled to the end were completed or dropped."""
        return all(index in self._completed or index in self._rejected for index in self._sampled)

    def round_version(self, round_index: int) -> int:
        """Returns the version that round `round_index` is sampled with in `boundary` mode: max(start_version, round − (S − C))."""
        return max(self.start_version, round_index - self.config.round_lag)

    def round_deficit(self, round_index: int) -> int:
        """Returns how many groups batches up to `round_index` lack at present: (round + 1)·B − (admitted − dropped), at least 0."""
        return max(0, (round_index + 1) * self.config.groups_per_step - self._live)

    def num_admissible(self, loaded_version: int) -> int:
        """Counts the groups that may start now: those that admitted − dropped lacks of min((u + S + 1)·B, num_steps·B).

        In `boundary` mode k + C takes the place of u + S, k being the open round, and none may start before its weights are loaded.

        Args:
            loaded_version: version u loaded by the generator, the smallest over its replicas.

        Raises:
            ValueError: no such version can be loaded yet, or it is newer than the one that the open round must be sampled with.
        """
        self._check_loaded(loaded_version)
        config = self.config
        if config.mode == "boundary" and loaded_version < self.round_version(self._round):
            return 0
        last = self._round + config.partial_rollout_rounds if config.mode == "boundary" else loaded_version + config.max_staleness
        return self.round_deficit(min(last, config.num_steps - 1))

    def admit(self, loaded_version: int) -> Admission:
        """Admits one group of class `loaded_version` and returns its place.

        Raises:
            ValueError: `num_admissible(loaded_version)` is 0.
        """
        if self.num_admissible(loaded_version) == 0:
            config = self.config
            raise ValueError(
                f"no group may start with version {loaded_version} loaded at step {self._step}: {self._admitted} admitted, "
                f"{self._dropped} dropped, max_staleness = {config.max_staleness}, groups_per_step = {config.groups_per_step}, "
                f"num_steps = {config.num_steps}, mode '{config.mode}'; wait until num_admissible({loaded_version}) is positive "
                f"or load newer weights"
            )
        admission = Admission(admission_index=self._admitted, version_class=loaded_version)
        self._class_of[admission.admission_index] = loaded_version
        self._admitted += 1
        return admission

    def mark_sampled(self, admission_indices: Sequence[int]) -> None:
        """Tells which groups one decode call has ended, all of them at once; `boundary` mode decides by it when a round is full.

        Raises:
            ValueError: a group is not outstanding or was marked before, or the mode is `in_flight`.
        """
        self._check_has_rounds("mark_sampled")
        for index in admission_indices:
            self._check_outstanding(index)
            if index in self._sampled:
                raise ValueError(f"group {index} was marked as sampled before; name each group once, after the call that ended it")
            self._sampled.add(index)

    def close_round(self) -> bool:
        """Gives back the places of dropped groups; if the round is full without them, chooses its batch and opens the next round.

        Returns:
            Whether the round was closed; if not, it goes on.

        Raises:
            ValueError: the round is not full, a sampled group has no reward yet, or the mode is `in_flight`.
        """
        if not self.is_round_full:
            raise ValueError(
                f"round {self._round} is not full: {len(self._sampled)} groups are sampled, schedule.groups_per_step = "
                f"{self.config.groups_per_step}; go on sampling until is_round_full"
            )
        if not self.is_round_judged:
            waiting = sorted(index for index in self._sampled if index not in self._completed and index not in self._rejected)
            raise ValueError(f"round {self._round} cannot be closed before groups {waiting} have their rewards; wait for is_round_judged")
        for index in self._rejected:
            del self._class_of[index]
        self._sampled -= self._rejected
        self._rejected.clear()
        if not self.is_round_full:
            return False
        batch = tuple(sorted(self._sampled)[: self.config.groups_per_step])
        self._sampled.difference_update(batch)
        self._batches.append(batch)
        self._round += 1
        return True

    def round_start(self) -> RoundStart:
        """Returns what a resumed run needs; call it between `close_round` and the next admission or report.

        Raises:
            ValueError: the mode is `in_flight`, which has no rounds.
        """
        self._check_has_rounds("round_start")
        return RoundStart(
            round_index=self._round,
            num_dropped=self._dropped,
            batches=tuple(self._batches),
            class_of=dict(self._class_of),
            completed=tuple(sorted(self._sampled)),
        )

    def complete(self, admission_index: int) -> None:
        """Marks a group as rewarded and ready for a batch.

        Raises:
            ValueError: the group is not outstanding, was completed or dropped before, or is not sampled to the end (`boundary`).
        """
        self._check_awaits_reward(admission_index)
        self._completed[admission_index] = None

    def drop(self, admission_index: int) -> None:
        """Gives back the place of a group that was filtered out or failed, in `boundary` mode when its round is closed.

        Raises:
            ValueError: as for `complete`.
            RuntimeError: more groups than `max_dropped_batches` allows were dropped since the last batch.
        """
        self._check_awaits_reward(admission_index)
        if self.config.mode == "boundary":
            self._rejected.add(admission_index)
        else:
            del self._class_of[admission_index]
        self._dropped += 1
        self._dropped_since_batch += 1
        config = self.config
        if self._dropped_since_batch > config.max_dropped_batches * config.groups_per_step:
            raise RuntimeError(
                f"{self._dropped_since_batch} groups were dropped while batch {self._step} was filled, more than "
                f"schedule.max_dropped_batches × groups_per_step = {config.max_dropped_batches} × {config.groups_per_step}; check the "
                f"reward and the filter (are all rewards of a group equal?), or raise max_dropped_batches"
            )

    def next_batch(self) -> tuple[int, ...] | None:
        """Takes batch `step` and moves on to the next step.

        Returns:
            B admission indices (ascending in `boundary` mode, in completion order in `in_flight` mode), or None if no legal batch is
            completed, in `boundary` mode chosen, yet.

        Raises:
            ValueError: the run's last batch was taken before.
            StalenessError: a group is older than the bound.
        """
        if self.is_finished:
            raise ValueError(f"all {self.config.num_steps} batches (schedule.num_steps) were taken; stop after the last one")
        if (batch := self._choose()) is None:
            return None
        for index in batch:
            version, bound = self._class_of[index], self.config.max_staleness
            check_staleness(step=self._step, oldest_version=version, max_staleness=bound, what=f"group {index}")
        for index in batch:
            del self._class_of[index], self._completed[index]
        if self._batches:
            self._batches.popleft()
        self._step += 1
        self._dropped_since_batch = 0
        return tuple(batch)

    def outstanding(self) -> tuple[int, ...]:
        """Returns the admission indices that were neither consumed nor dropped, ascending: what a checkpoint must not lose."""
        return tuple(self._class_of)

    def state(self) -> ScheduleState:
        """Returns counts for metrics."""
        consumed = self._step * self.config.groups_per_step
        return ScheduleState(
            step=self._step,
            num_admitted=self._admitted,
            num_completed=consumed + len(self._completed),
            num_dropped=self._dropped,
            num_consumed=consumed,
            outstanding_by_class=dict(sorted(Counter(self._class_of.values()).items())),
        )

    @property
    def _live(self) -> int:
        """Counts admitted − dropped groups; in `boundary` mode a dropped one counts until its round is closed."""
        return self._step * self.config.groups_per_step + len(self._class_of)

    def _check_has_rounds(self, what: str) -> None:
        if self.config.mode != "boundary":
            raise ValueError(f"mode 'in_flight' has no rounds; ask num_admissible() and next_batch() instead of {what}")

    def _check_loaded(self, loaded_version: int) -> None:
        if not self.start_version <= loaded_version <= self._step:
            raise ValueError(
                f"loaded_version {loaded_version} is outside start_version = {self.start_version} … step = {self._step}; "
                "pass the version of the weights that the generator has loaded"
            )
        if self.config.mode == "boundary" and not self.is_exhausted and loaded_version > self.round_version(self._round):
            raise ValueError(
                f"version {loaded_version} is loaded, but round {self._round} is sampled with exactly version "
                f"{self.round_version(self._round)}; in 'boundary' mode load round_version(open_round), not the newest version"
            )

    def _check_outstanding(self, admission_index: int) -> None:
        if admission_index not in self._class_of:
            raise ValueError(f"group {admission_index} is not outstanding: it was never admitted, or was consumed or dropped before")

    def _check_awaits_reward(self, admission_index: int) -> None:
        self._check_outstanding(admission_index)
        if admission_index in self._completed or admission_index in self._rejected:
            raise ValueError(f"group {admission_index} was completed or dropped before; call complete() or drop() once for each group")
        if self.config.mode == "boundary" and admission_index not in self._sampled:
            raise ValueError(f"group {admission_index} has a reward before it is sampled to the end; call mark_sampled() first")

    def _choose(self) -> Sequence[int] | None:
        if self.config.mode == "in_flight":
            return self._choose_completed()
        return self._batches[0] if self._batches else None

    def _choose_completed(self) -> Sequence[int] | None:
        """Chooses the earliest completions that leave a place for each group that is needed (`in_flight`)."""
        batch: list[int] = []
        free = self._places_for_younger()
        for index in self._completed:
            if len(batch) == self.config.groups_per_step:
                break
            limits = [version for version in free if version < self._class_of[index]]
            if all(free[version] > 0 for version in limits):
                batch.append(index)
                for version in limits:
                    free[version] -= 1
        return batch if len(batch) == self.config.groups_per_step else None

    def _places_for_younger(self) -> dict[int, int]:
        """Maps each class j to B − need(j), the places of this batch that groups of classes > j may take."""
        places: dict[int, int] = {}
        num_older = 0
        for version, count in self.state().outstanding_by_class.items():
            num_older += count
            may_remain = max(0, version + self.config.max_staleness - self._step) * self.config.groups_per_step
            places[version] = self.config.groups_per_step - max(0, num_older - may_remain)
        return places


class SharedSchedule:
    """A `Schedule` for several threads: the same methods under one lock, a way to wait for a change, and `close`.

    Args:
        schedule: the bookkeeping; nobody else may touch it from now on.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.config = schedule.config
        self.start_version = schedule.start_version
        self._schedule = schedule
        self._monitor = Monitor("schedule")

    def wait_until(
        self,
        predicate: Callable[[Schedule], bool],
        *,
        timeout_s: float | None = None,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Waits until `predicate(schedule)` holds; it is evaluated under the lock after each change and each `notify`.

        Args:
            predicate: quick function of the schedule that changes nothing.
            timeout_s: seconds to wait at most, None for no limit.
            on_wait: is told the seconds waited.

        Raises:
            ChannelClosed: the schedule was closed.
            TimeoutError: the time is up.
        """
        with self._monitor.when(lambda: predicate(self._schedule), timeout_s=timeout_s, on_wait=on_wait):
            pass

    def notify(self) -> None:
        """Makes waiting threads look again, for a predicate that also depends on something else (new weights, for instance)."""
        self._monitor.notify()

    def close(self, error: BaseException | None = None) -> None:
        """Wakes all waiting threads with `ChannelClosed`; later changes are refused, `state` and `outstanding` can still be read."""
        self._monitor.close(error)

    def admit(self, loaded_version: int) -> Admission:
        """Admits one group; see `Schedule.admit`."""
        with self._monitor.when():
            return self._schedule.admit(loaded_version)

    def mark_sampled(self, admission_indices: Sequence[int]) -> None:
        """Tells which groups one decode call has ended; see `Schedule.mark_sampled`."""
        with self._monitor.when():
            self._schedule.mark_sampled(admission_indices)

    def close_round(self) -> bool:
        """Closes the open round if it is full without dropped groups; see `Schedule.close_round`."""
        with self._monitor.when():
            return self._schedule.close_round()

    def round_start(self) -> RoundStart:
        """Returns what a resumed run needs; see `Schedule.round_start`."""
        with self._monitor:
            return self._schedule.round_start()

    def complete(self, admission_index: int) -> None:
        """Marks a group as ready; see `Schedule.complete`."""
        with self._monitor.when():
            self._schedule.complete(admission_index)

    def drop(self, admission_index: int) -> None:
        """Gives back a group's place; see `Schedule.drop`."""
        with self._monitor.when():
            self._schedule.drop(admission_index)

    def next_batch(self) -> tuple[int, ...] | None:
        """Takes the next batch if there is one, without waiting; see `Schedule.next_batch`."""
        with self._monitor.when():
            return self._schedule.next_batch()

    def wait_next_batch(self, *, timeout_s: float | None = None, on_wait: Callable[[float], None] | None = None) -> tuple[int, ...]:
        """Waits for the next batch and takes it; arguments and errors as for `wait_until` and `Schedule.next_batch`."""

        def is_answerable() -> bool:
            return self._schedule.is_batch_ready or self._schedule.is_finished

        with self._monitor.when(is_answerable, timeout_s=timeout_s, on_wait=on_wait):
            batch = self._schedule.next_batch()
        assert batch is not None
        return batch

    def num_admissible(self, loaded_version: int) -> int:
        """Counts the groups that may start now; see `Schedule.num_admissible`."""
        with self._monitor:
            return self._schedule.num_admissible(loaded_version)

    def round_version(self, round_index: int) -> int:
        """Returns the version of a round; see `Schedule.round_version`."""
        return self._schedule.round_version(round_index)

    def round_deficit(self, round_index: int) -> int:
        """Returns how many groups a round lacks; see `Schedule.round_deficit`."""
        with self._monitor:
            return self._schedule.round_deficit(round_index)

    def outstanding(self) -> tuple[int, ...]:
        """Returns the admission indices in progress; see `Schedule.outstanding`."""
        with self._monitor:
            return self._schedule.outstanding()

    def state(self) -> ScheduleState:
        """Returns counts for metrics; see `Schedule.state`."""
        with self._monitor:
            return self._schedule.state()

    @property
    def step(self) -> int:
        """Returns the number of the next batch."""
        with self._monitor:
            return self._schedule.step

    @property
    def is_finished(self) -> bool:
        """Tells whether every batch of the run was taken."""
        with self._monitor:
            return self._schedule.is_finished

    @property
    def is_batch_ready(self) -> bool:
        """Tells whether `next_batch` would return a batch."""
        with self._monitor:
            return self._schedule.is_batch_ready

    @property
    def is_exhausted(self) -> bool:
        """Tells whether no group will be admitted any more."""
        with self._monitor:
            return self._schedule.is_exhausted

    @property
    def open_round(self) -> int:
        """Returns the round that is being sampled (`boundary` mode); see `Schedule.open_round`."""
        with self._monitor:
            return self._schedule.open_round

    @property
    def is_round_full(self) -> bool:
        """Tells whether the open round can be closed once all is rewarded; see `Schedule.is_round_full`."""
        with self._monitor:
            return self._schedule.is_round_full
