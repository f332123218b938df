"""The schedule under simulated runs: any completion order, drops, late loads, several replicas, both modes.

`simulate` plays generator, reward and trainer against a `Schedule`. It keeps the true versions of each group's tokens, apart from
what the schedule is told, and checks them when the group is trained on. The same simulation must find a violation as soon as one
rule is replaced by a plausible wrong one.
"""

import copy
import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from llamarl_jax.channels import ChannelClosed
from llamarl_jax.schedule import RoundStart, Schedule, ScheduleConfig, SharedSchedule, StalenessError, check_staleness


class FirstCompletedSchedule(Schedule):
    """The wrong batching rule: whatever completed first."""

    def _choose(self):
        batch = list(self._completed)[: self.config.groups_per_step]
        return batch if len(batch) == self.config.groups_per_step else None


class FirstSampledSchedule(Schedule):
    """The wrong end of a round: as soon as a batch of any groups is sampled."""

    @property
    def is_round_full(self):
        return len(self._sampled) >= self.config.groups_per_step


class LaggingSchedule(Schedule):
    """The wrong weights of a round with partial rollouts: those that leave no time for what is carried over."""

    def round_version(self, round_index):
        return max(self.start_version, round_index - self.config.max_staleness)


class EagerSchedule(Schedule):
    """The wrong time to replace a dropped group: at once, which depends on when its reward came."""

    def drop(self, admission_index):
        super().drop(admission_index)
        self._rejected.discard(admission_index)
        self._sampled.discard(admission_index)
        del self._class_of[admission_index]


@dataclass(frozen=True)
class Scenario:
    config: ScheduleConfig
    num_replicas: int
    start_version: int
    drop_percent: int
    num_slots: int
    source: random.Random = field(repr=False)


def scenarios(mode: str | None = None) -> st.SearchStrategy[Scenario]:
    def build(batch, staleness, carried, chosen_mode, start, num_steps, replicas, drop_percent, num_slots, source):
        config = ScheduleConfig(
            num_steps=start + num_steps,
            groups_per_step=batch,
            max_staleness=staleness,
            mode=chosen_mode,
            partial_rollout_rounds=min(carried, staleness) if chosen_mode == "boundary" else 0,
            max_dropped_batches=1000,
        )
        return Scenario(config, replicas, start, drop_percent, num_slots, source)

    modes = st.sampled_from(["boundary", "in_flight"]) if mode is None else st.just(mode)
    return st.builds(
        build,
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(0, 3),
        modes,
        st.integers(0, 3),
        st.integers(1, 9),
        st.integers(1, 3),
        st.sampled_from([0, 20, 50]),
        st.integers(1, 9),
        st.randoms(use_true_random=False),
    )


@dataclass
class Group:
    replica: int
    versions: list[int]  # true version of each token
    is_generated: bool = False


class Run:
    """One simulated run; `tokens_of_batch[i]` lists (admission index, token versions) of the i-th batch."""

    def __init__(self, scenario: Scenario, schedule: Schedule, *, admit_by_trainer: bool = False):
        self.scenario, self.schedule, self.random = scenario, schedule, scenario.source
        self.admit_by_trainer = admit_by_trainer
        self.version = scenario.start_version  # committed by the trainer
        self.loaded = [scenario.start_version] * scenario.num_replicas
        self.running: dict[int, Group] = {}
        self.completed: dict[int, Group] = {}
        self.num_drops = 0
        self.batch_in_training: tuple[int, ...] | None = None
        self.tokens_of_batch: list[list[tuple[int, list[int]]]] = []
        self.num_admitted = 0

    def is_dropped(self, index: int) -> bool:
        """A drop depends on the group alone, so that runs with different timing can be compared; their number is limited."""
        return self.num_drops < 60 and random.Random(index).randrange(100) < self.scenario.drop_percent

    def told_version(self) -> int:
        return self.version if self.admit_by_trainer else min(self.loaded)

    def loadable(self) -> list[tuple[int, int]]:
        return [(i, version) for i, loaded in enumerate(self.loaded) for version in range(loaded + 1, self.version + 1)]

    def play(self) -> None:
        while self.version < self.scenario.config.num_steps:
            moves: list = [(self.load, load) for load in self.loadable()]
            moves += [(self.reward, index) for index, group in self.running.items() if group.is_generated]
            moves += self.generator_moves()
            if self.batch_in_training is not None:
                moves.append((self.commit, None))
            elif (self.random.randrange(2) == 0 or not moves) and self.take():
                continue
            assert moves, f"deadlock at step {self.schedule.step}: {self.schedule.state()}"
            move, argument = self.random.choice(moves)
            move(argument)

    def generator_moves(self) -> list:
        moves: list = [(self.generate, index) for index, group in self.running.items() if not group.is_generated]
        return [*moves, (self.admit, None)] if self.schedule.num_admissible(self.told_version()) > 0 else moves

    def load(self, load: tuple[int, int]) -> None:
        replica, version = load
        self.loaded[replica] = version

    def admit(self, _) -> None:
        replica = self.random.randrange(len(self.loaded))
        admission = self.schedule.admit(self.told_version())
        self.running[admission.admission_index] = Group(replica, [self.loaded[replica]])
        self.num_admitted += 1

    def generate(self, index: int) -> None:
        group = self.running[index]
        group.versions.append(self.loaded[group.replica])
        group.is_generated = self.random.randrange(2) == 0

    def reward(self, index: int) -> None:
        group = self.running.pop(index)
        if self.is_dropped(index):
            self.num_drops += 1
            self.schedule.drop(index)
        else:
            self.completed[index] = group
            self.schedule.complete(index)

    def take(self) -> bool:
        step = self.schedule.step
        assert step == self.version
        self.batch_in_training = self.schedule.next_batch()
        if self.batch_in_training is None:
            return False
        groups = [(index, self.completed.pop(index).versions) for index in self.batch_in_training]  # KeyError: not completed, or twice
        oldest = min(min(versions) for _, versions in groups)
        assert step - oldest <= self.scenario.config.max_staleness, f"staleness {step - oldest} at step {step}"
        self.tokens_of_batch.append(groups)
        return True

    def commit(self, _) -> None:
        self.batch_in_training = None
        self.version += 1


class RoundsRun(Run):
    """A run in `boundary` mode. Its generator makes decode calls; how many of them a group needs depends on the group alone.

    `starts` holds the schedule and all groups as each round begins.
    """

    def __init__(self, scenario: Scenario, schedule: Schedule):
        super().__init__(scenario, schedule)
        self.starts: list[tuple[RoundStart, dict[int, Group], dict[int, Group]]] = []

    def num_calls(self, index: int) -> int:
        return random.Random(-index).choice([1, 1, 1, 2, 3, 8])

    def loadable(self) -> list[tuple[int, int]]:
        if self.schedule.open_round >= self.scenario.config.num_steps:
            return []
        target = self.schedule.round_version(self.schedule.open_round)
        return [(i, target) for i, loaded in enumerate(self.loaded) if loaded < target <= self.version]

    def generator_moves(self) -> list:
        schedule = self.schedule
        if schedule.open_round >= self.scenario.config.num_steps or min(self.loaded) < schedule.round_version(schedule.open_round):
            return []
        if not schedule.is_round_full:
            return [(self.call, None)]
        return [(self.close, None)] if schedule.is_round_judged else []

    def call(self, _) -> None:
        live = [index for index, group in self.running.items() if not group.is_generated]
        while len(live) < self.scenario.num_slots and self.schedule.num_admissible(min(self.loaded)) > 0:
            self.admit(None)
            live.append(max(self.running))
        assert live, f"nothing to decode at step {self.schedule.step}: {self.schedule.state()}"
        for index in live:
            group = self.running[index]
            group.versions.append(self.loaded[group.replica])
            group.is_generated = len(group.versions) > self.num_calls(index)
        self.schedule.mark_sampled([index for index in live if self.running[index].is_generated])

    def close(self, _) -> None:
        if self.schedule.close_round():
            self.starts.append((self.schedule.round_start(), copy.deepcopy(self.running), copy.deepcopy(self.completed)))


def simulate(scenario: Scenario, schedule_class: type[Schedule] = Schedule, **options) -> Run:
    schedule = schedule_class(scenario.config, start_version=scenario.start_version)
    run = (RoundsRun if scenario.config.mode == "boundary" else Run)(scenario, schedule, **options)
    run.play()
    return run


def violates(scenario: Scenario, **wrong) -> bool:
    try:
        simulate(scenario, **wrong)
    except (StalenessError, AssertionError):
        return True
    return False


@settings(max_examples=400, deadline=None)
@given(scenarios())
def test_no_token_is_too_old_nothing_is_discarded_and_there_is_always_progress(scenario):
    run = simulate(scenario)
    config, num_batches = scenario.config, scenario.config.num_steps - scenario.start_version
    assert [len(batch) for batch in run.tokens_of_batch] == [config.groups_per_step] * num_batches
    consumed = [index for batch in run.tokens_of_batch for index, _ in batch]
    assert len(set(consumed)) == len(consumed) == run.num_admitted - run.num_drops  # with those that run or wait: none at the end
    assert not run.running
    assert not run.completed
    assert run.schedule.is_finished
    assert run.schedule.is_exhausted
    assert run.schedule.outstanding() == ()
    state = run.schedule.state()
    assert (state.step, state.num_consumed) == (config.num_steps, config.num_steps * config.groups_per_step)
    assert state.num_completed == state.num_consumed == state.num_admitted - state.num_dropped


def with_other_timing(scenario: Scenario, source: random.Random) -> Scenario:
    return replace(scenario, num_replicas=1, source=source)


@settings(max_examples=300, deadline=None)
@given(scenarios("boundary"), st.randoms(use_true_random=False))
def test_boundary_mode_does_not_depend_on_timing(scenario, other_timing):
    first, second = simulate(scenario), simulate(with_other_timing(scenario, other_timing))
    assert first.tokens_of_batch == second.tokens_of_batch


@settings(max_examples=200, deadline=None)
@given(scenarios("boundary"))
def test_a_round_has_one_version_and_carries_nothing_further_than_it_may(scenario):
    config, start = scenario.config, scenario.start_version
    for step, batch in enumerate(simulate(scenario).tokens_of_batch, start):
        assert [index for index, _ in batch] == sorted(index for index, _ in batch)
        for _, versions in batch:
            assert versions == sorted(versions)
            assert max(versions) <= max(start, step - config.round_lag)
            assert min(versions) >= max(start, step - config.round_lag - config.partial_rollout_rounds)
            if config.partial_rollout_rounds == 0:
                assert set(versions) == {max(start, step - config.max_staleness)}


@settings(max_examples=200, deadline=None)
@given(scenarios("boundary"), st.randoms(use_true_random=False))
def test_a_run_that_is_resumed_amid_its_rounds_equals_the_uninterrupted_one(scenario, other_timing):
    config, whole = scenario.config, simulate(scenario)
    assert isinstance(whole, RoundsRun)
    for start, running, completed in whole.starts:
        version = start.round_index - config.round_lag
        num_taken = start.round_index - len(start.batches) - version
        if version <= scenario.start_version or num_taken > 0:  # a trainer that writes a checkpoint of this version is not further on
            continue
        schedule = Schedule(config, start_version=version, round_start=start.at_step(version))
        resumed = RoundsRun(with_other_timing(scenario, other_timing), schedule)
        resumed.version, resumed.loaded = version, [version]
        resumed.running, resumed.completed = copy.deepcopy(running), copy.deepcopy(completed)
        resumed.num_drops = start.num_dropped
        for group in resumed.running.values():
            group.replica = 0
        resumed.play()
        assert resumed.tokens_of_batch == whole.tokens_of_batch[version - scenario.start_version :]


def test_all_small_runs_with_partial_rollouts_keep_the_bound():
    """Every way in which the first groups can be short or long, kept or dropped, for small batches, bounds and slots."""

    class Listed(RoundsRun):
        lengths: tuple[int, ...]
        drops: tuple[bool, ...]

        def num_calls(self, index):
            return self.lengths[index] if index < len(self.lengths) else 1

        def is_dropped(self, index):
            return index < len(self.drops) and self.drops[index]

    num_carried = 0
    shapes = itertools.product([1, 2], [(1, 1), (2, 1), (2, 2)], [1, 2, 4])
    for batch, (staleness, carried), num_slots in shapes:
        config = ScheduleConfig(num_steps=4, groups_per_step=batch, max_staleness=staleness, partial_rollout_rounds=carried)
        for lengths in itertools.product([1, 4], repeat=5):
            for drops in itertools.product([False, True], repeat=3):
                run = Listed(Scenario(config, 1, 0, 0, num_slots, random.Random(0)), Schedule(config))
                run.lengths, run.drops = lengths, drops
                run.play()
                assert [len(groups) for groups in run.tokens_of_batch] == [batch] * 4
                num_carried += any(len(set(versions)) > 1 for groups in run.tokens_of_batch for _, versions in groups)
    assert num_carried > 1000  # of 4608 runs


@settings(max_examples=150, deadline=None)
@given(scenarios("in_flight"))
def test_in_flight_batch_is_the_first_legal_one_in_completion_order(scenario):
    """An exhaustive search over all legal choices, lexicographic in completion order, is the oracle for the greedy pass."""

    class Checked(Schedule):
        def _choose(self):
            chosen = super()._choose()
            assert chosen == first_legal_batch(self)
            return chosen

    simulate(scenario, Checked)


def first_legal_batch(schedule: Schedule) -> list[int] | None:
    batch_size, bound, step = schedule.config.groups_per_step, schedule.config.max_staleness, schedule.step
    class_of, completed = schedule._class_of, list(schedule._completed)

    def is_legal(batch: list[int]) -> bool:
        rest = [version for index, version in class_of.items() if index not in batch]
        return all(sum(v <= j for v in rest) <= max(0, j + bound - step) * batch_size for j in range(step + 1))

    def extend(batch: list[int], position: int) -> list[int] | None:
        if len(batch) == batch_size:
            return batch if is_legal(batch) else None
        for i in range(position, len(completed)):
            if (found := extend([*batch, completed[i]], i + 1)) is not None:
                return found
        return None

    return extend([], 0)


FIND = settings(max_examples=5000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])


def test_simulation_finds_the_fault_of_first_completed_first():
    found = find(scenarios("in_flight"), lambda scenario: violates(scenario, schedule_class=FirstCompletedSchedule), settings=FIND)
    assert found.config.max_staleness >= 1


def test_simulation_finds_the_fault_of_admission_by_the_trainers_version():
    find(scenarios("in_flight"), lambda scenario: violates(scenario, admit_by_trainer=True), settings=FIND)


@pytest.mark.parametrize("wrong", [FirstSampledSchedule, LaggingSchedule])
def test_simulation_finds_the_fault_of_rounds_that_end_too_early_or_with_weights_too_old(wrong):
    found = find(scenarios("boundary"), lambda scenario: violates(scenario, schedule_class=wrong), settings=FIND)
    assert found.config.partial_rollout_rounds >= 1


def test_simulation_finds_the_fault_of_replacing_dropped_groups_at_once():
    def depends_on_timing(scenario):
        runs = [simulate(with_other_timing(scenario, random.Random(i)), schedule_class=EagerSchedule) for i in (0, 1)]
        return runs[0].tokens_of_batch != runs[1].tokens_of_batch

    find(scenarios("boundary"), depends_on_timing, settings=FIND)


def test_simulation_finds_no_fault_in_the_rules_with_the_same_search():
    with pytest.raises(NoSuchExample):
        find(scenarios(), violates, settings=settings(FIND, max_examples=200))


def admit(schedule: Schedule, loaded_version: int) -> list[int]:
    return [schedule.admit(loaded_version).admission_index for _ in range(schedule.num_admissible(loaded_version))]


def finish(schedule: Schedule, indices: Sequence[int], dropped: Sequence[int] = ()) -> None:
    """Does what generator and reward do when a decode call ends groups."""
    if schedule.config.mode == "boundary":
        schedule.mark_sampled(indices)
    for index in indices:
        schedule.drop(index) if index in dropped else schedule.complete(index)


@pytest.mark.parametrize(
    ("mode", "staleness", "carried"), [("boundary", 0, 0), ("boundary", 2, 0), ("boundary", 3, 2), ("in_flight", 0, 0), ("in_flight", 3, 0)]
)
def test_most_completions_are_what_can_be_admitted_at_once(mode, staleness, carried):
    """At the start of a run, and again after the first step and its weights, with everything else unfinished."""
    config = ScheduleConfig(
        num_steps=9,
        groups_per_step=3,
        group_size=4,
        max_staleness=staleness,
        mode=mode,
        partial_rollout_rounds=carried,
    )
    schedule = Schedule(config)
    first = admit(schedule, 0)
    assert len(first) * config.group_size == config.most_completions
    if mode == "in_flight":
        finish(schedule, first[:3])
        assert schedule.next_batch() == tuple(first[:3])
        again = admit(schedule, 1)
        assert (len(first) - 3 + len(again)) * config.group_size == config.most_completions


def two_young_groups_overtake_four_old_ones(schedule: Schedule) -> None:
    """B = 2, S = 2: at step 1 four groups of class 0 are outstanding, two of class 1 complete first, then all."""
    assert admit(schedule, 0) == [0, 1, 2, 3, 4, 5]
    for index in (0, 1):
        schedule.complete(index)
    assert schedule.next_batch() == (0, 1)
    assert admit(schedule, 1) == [6, 7]
    for index in (6, 7, 2, 3, 4, 5):
        schedule.complete(index)


IN_FLIGHT_2_2 = ScheduleConfig(num_steps=10, groups_per_step=2, max_staleness=2, mode="in_flight")


def test_first_completed_first_breaks_the_bound_in_the_counter_example():
    schedule = FirstCompletedSchedule(IN_FLIGHT_2_2)
    two_young_groups_overtake_four_old_ones(schedule)
    assert schedule.next_batch() == (6, 7)
    assert schedule.next_batch() == (2, 3)
    with pytest.raises(StalenessError, match=r"group 4 has a token of version 0 at step 3: staleness 3 exceeds max_staleness = 2"):
        schedule.next_batch()


def test_due_groups_are_taken_first_in_the_counter_example():
    schedule = Schedule(IN_FLIGHT_2_2)
    two_young_groups_overtake_four_old_ones(schedule)
    assert [schedule.next_batch() for _ in range(4)] == [(2, 3), (4, 5), (6, 7), None]


def test_in_flight_lets_young_groups_overtake_where_there_is_slack_and_waits_for_due_ones():
    schedule = Schedule(ScheduleConfig(num_steps=10, groups_per_step=2, max_staleness=2, mode="in_flight"))
    admit(schedule, 0)
    for index in (5, 4):
        schedule.complete(index)
    assert schedule.next_batch() == (5, 4)  # completion order within a class
    admit(schedule, 1)
    schedule.complete(0)
    schedule.drop(1)  # makes room: three of class 0 were left, now two, and step 2 can take them
    assert schedule.next_batch() is None
    schedule.complete(7)
    assert schedule.next_batch() == (0, 7)  # group 7 of class 1 overtakes 2 and 3
    for index in admit(schedule, 2):
        schedule.complete(index)
    assert schedule.next_batch() is None  # 2 and 3 are due at step 2, so it waits for them
    schedule.complete(3)
    assert not schedule.is_batch_ready
    schedule.complete(2)
    assert schedule.is_batch_ready
    assert schedule.next_batch() == (3, 2)


def test_admission_counts_loaded_versions_and_stops_at_the_end_of_the_run():
    schedule = Schedule(ScheduleConfig(num_steps=3, groups_per_step=4, max_staleness=1, mode="in_flight"))
    assert schedule.num_admissible(0) == 8
    for index in admit(schedule, 0):
        schedule.complete(index)
    assert schedule.num_admissible(0) == 0
    assert schedule.next_batch() == (0, 1, 2, 3)
    assert schedule.num_admissible(0) == 0  # the trainer may be at version 1 by now: what counts is what is loaded
    assert schedule.num_admissible(1) == 4
    assert admit(schedule, 1) == [8, 9, 10, 11]
    assert schedule.next_batch() == (4, 5, 6, 7)
    assert schedule.num_admissible(2) == 0  # three batches are all that the run needs
    assert not schedule.is_exhausted  # one of them may still be dropped
    schedule.drop(8)
    assert schedule.num_admissible(2) == 1
    assert admit(schedule, 2) == [12]
    for index in (9, 10, 11, 12):
        schedule.complete(index)
    assert schedule.is_exhausted
    assert not schedule.is_finished


def test_on_policy_bound_alternates_generation_and_training():
    for mode in ("boundary", "in_flight"):
        schedule = Schedule(ScheduleConfig(num_steps=3, groups_per_step=2, max_staleness=0, mode=mode))
        for step in range(3):
            indices = admit(schedule, step)
            assert len(indices) == 2
            finish(schedule, indices)
            assert schedule.num_admissible(step) == 0
            assert mode == "in_flight" or schedule.close_round()
            assert schedule.next_batch() == tuple(indices)


def test_boundary_round_replaces_dropped_groups_before_the_next_round_opens():
    schedule = Schedule(ScheduleConfig(num_steps=4, groups_per_step=3, max_staleness=1, mode="boundary"))
    assert (schedule.open_round, schedule.round_version(0), schedule.round_deficit(0)) == (0, 0, 3)
    assert admit(schedule, 0) == [0, 1, 2]
    finish(schedule, [1, 2], dropped=[1])
    assert not schedule.is_round_full
    assert (schedule.num_admissible(0), schedule.state().num_dropped) == (0, 1)  # the place is given back when the round is closed
    finish(schedule, [0], dropped=[0])
    assert schedule.is_round_full
    assert not schedule.close_round()
    assert admit(schedule, 0) == [3, 4]
    finish(schedule, [4])
    schedule.mark_sampled([3])
    assert schedule.is_round_full
    assert not schedule.is_round_judged
    assert schedule.next_batch() is None
    schedule.complete(3)
    assert schedule.next_batch() is None  # the round is not closed
    assert schedule.close_round()
    assert (schedule.open_round, schedule.round_version(1)) == (1, 0)
    assert admit(schedule, 0) == [5, 6, 7]  # S = 1: the next round does not wait for the trainer
    assert schedule.next_batch() == (2, 3, 4)
    finish(schedule, [5, 6, 7])
    assert schedule.close_round()
    assert (schedule.open_round, schedule.round_version(2), schedule.num_admissible(0)) == (2, 1, 0)
    assert schedule.num_admissible(1) == 3


def test_a_partial_rollout_is_carried_over_until_it_is_due():
    """B = 2, S = 2, C = 1: group 1 is long. Round 0 leaves it running, round 1 waits for it."""
    schedule = Schedule(ScheduleConfig(num_steps=4, groups_per_step=2, max_staleness=2, partial_rollout_rounds=1))
    assert admit(schedule, 0) == [0, 1, 2, 3]
    finish(schedule, [3])
    assert not schedule.is_round_full
    finish(schedule, [0])
    assert schedule.close_round()
    assert [schedule.round_version(k) for k in range(4)] == [0, 0, 1, 2]
    assert admit(schedule, 0) == [4, 5]
    finish(schedule, [2, 4])
    assert schedule.is_round_full  # 1 and 5 of class 0 are left, which step 2 can take
    assert schedule.close_round()
    assert schedule.next_batch() == (0, 3)
    assert schedule.num_admissible(0) == 0  # round 2 is sampled with version 1
    assert admit(schedule, 1) == [6, 7]
    finish(schedule, [6, 7])
    assert not schedule.is_round_full  # step 2 is the last one for class 0
    finish(schedule, [5])
    assert not schedule.is_round_full
    start = schedule.round_start()
    assert (start.round_index, start.batches, start.completed) == (2, ((2, 4),), (5, 6, 7))
    finish(schedule, [1])
    assert schedule.close_round()
    assert [schedule.next_batch() for _ in range(2)] == [(2, 4), (1, 5)]
    assert schedule.is_round_full  # round 3 has all that it needs from the start
    assert schedule.close_round()
    assert schedule.next_batch() == (6, 7)
    assert schedule.is_exhausted


def test_a_batch_that_waits_stays_in_what_a_resumed_run_takes_up():
    schedule = Schedule(ScheduleConfig(num_steps=5, groups_per_step=1, max_staleness=2, partial_rollout_rounds=0))
    for index in range(3):
        finish(schedule, admit(schedule, 0))
        assert schedule.close_round(), index
    start = schedule.round_start()
    assert (start.batches, dict(start.class_of)) == (((0,), (1,), (2,)), {0: 0, 1: 0, 2: 0})
    cut = start.at_step(1)
    assert (cut.batches, dict(cut.class_of)) == (((1,), (2,)), {1: 0, 2: 0})
    resumed = Schedule(schedule.config, start_version=1, round_start=cut)
    assert (resumed.open_round, resumed.round_version(3), resumed.outstanding()) == (3, 1, (1, 2))
    assert admit(resumed, 1) == [3]
    assert [resumed.next_batch(), resumed.next_batch(), resumed.next_batch()] == [(1,), (2,), None]
    with pytest.raises(
        ValueError, match=r"round 3 begins with 3 batches that wait, the first of them not batch 1 = start_version; .*at_step\(1\)"
    ):
        Schedule(schedule.config, start_version=1, round_start=start)


def test_a_resumed_run_that_is_made_shorter_needs_nothing_more():
    config = ScheduleConfig(num_steps=9, groups_per_step=1, max_staleness=2, partial_rollout_rounds=1)
    schedule = Schedule(config)
    admit(schedule, 0)
    finish(schedule, [0])
    assert schedule.close_round()
    shorter = Schedule(replace(config, num_steps=1), round_start=schedule.round_start())
    assert shorter.is_exhausted
    assert not shorter.is_round_full
    assert shorter.next_batch() == (0,)
    assert shorter.is_finished


@pytest.mark.parametrize("mode", ["boundary", "in_flight"])
def test_resume_goes_on_with_steps_versions_and_indices(mode):
    schedule = Schedule(ScheduleConfig(num_steps=7, groups_per_step=2, max_staleness=1, mode=mode), start_version=5, start_dropped=3)
    assert (schedule.step, schedule.round_version(5), schedule.round_version(6)) == (5, 5, 5)
    assert admit(schedule, 5)[0] == 13
    finish(schedule, [13, 14])
    assert mode == "in_flight" or schedule.close_round()
    admit(schedule, 5)
    assert schedule.outstanding() == (13, 14, 15, 16)
    assert schedule.next_batch() == (13, 14)
    state = schedule.state()
    assert (state.step, state.num_admitted, state.num_completed, state.num_dropped, state.num_consumed) == (6, 17, 12, 3, 12)
    assert state.outstanding_by_class == {5: 2}


def test_nothing_is_generated_when_a_finished_run_is_resumed():
    for mode in ("boundary", "in_flight"):
        schedule = Schedule(ScheduleConfig(num_steps=7, mode=mode), start_version=7)
        assert schedule.is_finished
        assert schedule.is_exhausted
        assert schedule.num_admissible(7) == 0


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("num_steps", 0, r"schedule.num_steps is 0; it must be at least 1"),
        ("groups_per_step", 0, r"schedule.groups_per_step is 0"),
        ("group_size", -1, r"schedule.group_size is -1"),
        ("max_dropped_batches", 0, r"schedule.max_dropped_batches is 0"),
        ("max_staleness", -1, r"schedule.max_staleness is -1; it must be 0 \(synchronous\) or more"),
        ("mode", "async", r"schedule.mode is 'async'; choose 'boundary' or 'in_flight'"),
        ("partial_rollout_rounds", -1, r"schedule.partial_rollout_rounds is -1; it must be 0 \(every round finishes"),
        (
            "partial_rollout_rounds",
            2,
            r"partial_rollout_rounds = 2 exceeds schedule.max_staleness = 1: .*lower partial_rollout_rounds to 1",
        ),
    ],
)
def test_config_errors_name_field_and_value(field_name, value, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**{field_name: value})


def test_partial_rollouts_need_rounds_and_a_bound_above_zero():
    with pytest.raises(ValueError, match=r"partial_rollout_rounds = 1 exceeds schedule.max_staleness = 0: .* or raise max_staleness"):
        ScheduleConfig(max_staleness=0, partial_rollout_rounds=1)
    with pytest.raises(
        ValueError, match=r"partial_rollout_rounds = 1 has no meaning in mode 'in_flight', .*set it to 0 or schedule.mode to"
    ):
        ScheduleConfig(mode="in_flight", partial_rollout_rounds=1)


def test_start_outside_the_run_is_refused():
    with pytest.raises(ValueError, match=r"start_version 8 is outside 0 … num_steps = 7; raise schedule.num_steps"):
        Schedule(ScheduleConfig(num_steps=7), start_version=8)
    with pytest.raises(ValueError, match=r"start_dropped is -1; it is a count"):
        Schedule(ScheduleConfig(), start_dropped=-1)


def test_admission_error_names_the_numbers():
    schedule = Schedule(IN_FLIGHT_2_2)
    admit(schedule, 0)
    numbers = r"version 0 loaded at step 0: 6 admitted, 0 dropped, max_staleness = 2, groups_per_step = 2, num_steps = 10"
    with pytest.raises(ValueError, match=rf"no group may start with {numbers}.*wait until num_admissible\(0\) is positive"):
        schedule.admit(0)


def test_impossible_loaded_versions_are_refused():
    schedule = Schedule(IN_FLIGHT_2_2, start_version=4)
    for version in (3, 5):
        with pytest.raises(ValueError, match=rf"loaded_version {version} is outside start_version = 4 … step = 4"):
            schedule.num_admissible(version)


def test_boundary_mode_refuses_weights_that_are_newer_than_the_rounds():
    schedule = Schedule(ScheduleConfig(num_steps=4, groups_per_step=1, max_staleness=2, mode="boundary"))
    finish(schedule, [schedule.admit(0).admission_index])
    assert schedule.close_round()
    schedule.next_batch()
    with pytest.raises(
        ValueError, match=r"version 1 is loaded, but round 1 is sampled with exactly version 0; .*round_version\(open_round\)"
    ):
        schedule.admit(1)


def test_in_flight_mode_has_no_rounds():
    schedule = Schedule(IN_FLIGHT_2_2)
    for name, use in {
        "open_round": lambda: schedule.open_round,
        "is_round_full": lambda: schedule.is_round_full,
        "is_round_full ": schedule.close_round,
        "mark_sampled": lambda: schedule.mark_sampled([0]),
        "round_start": schedule.round_start,
    }.items():
        with pytest.raises(ValueError, match=rf"mode 'in_flight' has no rounds; ask num_admissible\(\) .* instead of {name.strip()}"):
            use()


def test_a_round_is_closed_when_it_is_full_and_judged():
    schedule = Schedule(ScheduleConfig(groups_per_step=2, max_staleness=1))
    admit(schedule, 0)
    finish(schedule, [0])
    with pytest.raises(ValueError, match=r"round 0 is not full: 1 groups are sampled, schedule.groups_per_step = 2; go on sampling"):
        schedule.close_round()
    schedule.mark_sampled([1])
    with pytest.raises(ValueError, match=r"round 0 cannot be closed before groups \[1\] have their rewards; wait for is_round_judged"):
        schedule.close_round()


def test_a_reward_comes_after_sampling_which_ends_once():
    schedule = Schedule(ScheduleConfig(groups_per_step=2, max_staleness=1))
    admit(schedule, 0)
    for judge in (schedule.complete, schedule.drop):
        with pytest.raises(ValueError, match=r"group 0 has a reward before it is sampled to the end; call mark_sampled\(\) first"):
            judge(0)
    schedule.mark_sampled([0])
    with pytest.raises(ValueError, match=r"group 0 was marked as sampled before; name each group once"):
        schedule.mark_sampled([0])
    with pytest.raises(ValueError, match=r"group 7 is not outstanding"):
        schedule.mark_sampled([7])
    schedule.drop(0)
    for again in (schedule.complete, schedule.drop):
        with pytest.raises(ValueError, match=r"group 0 was completed or dropped before"):
            again(0)


def test_a_group_is_completed_or_dropped_once():
    schedule = Schedule(IN_FLIGHT_2_2)
    admit(schedule, 0)
    schedule.complete(0)
    for again in (schedule.complete, schedule.drop):
        with pytest.raises(ValueError, match=r"group 0 was completed or dropped before"):
            again(0)
    schedule.drop(1)
    for unknown in (1, 99):
        with pytest.raises(ValueError, match=rf"group {unknown} is not outstanding"):
            schedule.complete(unknown)


def drop_for_ever(schedule: Schedule) -> None:
    while True:
        indices = admit(schedule, 0)
        finish(schedule, indices, dropped=indices)
        assert not schedule.close_round()


def test_dropping_everything_ends_with_an_error_instead_of_forever():
    schedule = Schedule(ScheduleConfig(groups_per_step=2, max_staleness=0, max_dropped_batches=3))
    with pytest.raises(RuntimeError, match=r"7 groups were dropped while batch 0 was filled, .* = 3 × 2; check the reward and the filter"):
        drop_for_ever(schedule)


def test_no_batch_after_the_last():
    schedule = Schedule(ScheduleConfig(num_steps=1, groups_per_step=1))
    finish(schedule, admit(schedule, 0))
    assert schedule.close_round()
    schedule.next_batch()
    with pytest.raises(ValueError, match=r"all 1 batches \(schedule.num_steps\) were taken; stop after the last one"):
        schedule.next_batch()
    assert not schedule.is_batch_ready


def test_check_staleness_accepts_the_bound_and_refuses_one_more():
    check_staleness(step=5, oldest_version=3, max_staleness=2, what="batch 5")
    with pytest.raises(StalenessError, match=r"batch 5 has a token of version 2 at step 5: staleness 3 exceeds max_staleness = 2"):
        check_staleness(step=5, oldest_version=2, max_staleness=2, what="batch 5")


def run_in_thread(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_shared_schedule_carries_a_run_over_three_threads():
    shared = SharedSchedule(Schedule(ScheduleConfig(num_steps=20, groups_per_step=3, max_staleness=1, mode="boundary")))
    batches, waits, starts = [], [], []

    def generate():
        for round_index in range(20):
            version = shared.round_version(round_index)
            shared.wait_until(lambda s, r=round_index, v=version: s.open_round == r and s.step >= v, timeout_s=30, on_wait=waits.append)
            while not (shared.is_round_full and shared.close_round()):
                indices = [shared.admit(version).admission_index for _ in range(shared.num_admissible(version))]
                shared.mark_sampled(indices)
                for index in indices:
                    shared.drop(index) if index % 5 == 0 else shared.complete(index)
        starts.append(shared.round_start())

    def train():
        batches.extend(shared.wait_next_batch(timeout_s=30, on_wait=waits.append) for _ in range(20))

    for thread in [run_in_thread(generate), run_in_thread(train)]:
        thread.join(60)
        assert not thread.is_alive()
    assert [index for batch in batches for index in batch] == [index for index in range(75) if index % 5 != 0]
    assert shared.is_finished
    assert not shared.is_batch_ready
    assert shared.state().num_dropped == 15
    assert (shared.step, shared.outstanding(), shared.round_deficit(19)) == (20, (), 0)
    assert [start.round_index for start in starts] == [20]
    assert len(waits) == 40
    assert min(waits) >= 0
    with pytest.raises(ValueError, match=r"all 20 batches"):
        shared.next_batch()


def test_closing_a_shared_schedule_wakes_the_waiting_and_keeps_the_counts_readable():
    shared = SharedSchedule(Schedule(IN_FLIGHT_2_2))
    is_asked, caught, root = threading.Event(), [], KeyError("root")

    def wait():
        def never(_):
            is_asked.set()
            return False

        try:
            shared.wait_until(never)
        except ChannelClosed as error:
            caught.append(error)

    thread = run_in_thread(wait)
    assert is_asked.wait(30)
    shared.close(root)
    thread.join(30)
    assert caught[0].__cause__ is root
    with pytest.raises(ChannelClosed, match=r"schedule was closed by KeyError: 'root'"):
        shared.admit(0)
    assert shared.state().num_admitted == 0


def test_notify_lets_a_predicate_see_what_happened_elsewhere():
    shared = SharedSchedule(Schedule(IN_FLIGHT_2_2))
    is_asked, has_new_weights = threading.Event(), threading.Event()

    def predicate(_):
        is_asked.set()
        return has_new_weights.is_set()

    thread = run_in_thread(lambda: shared.wait_until(predicate, timeout_s=30))
    assert is_asked.wait(30)
    has_new_weights.set()
    shared.notify()
    thread.join(30)
    assert not thread.is_alive()
