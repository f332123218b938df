"""The schedule under simulated runs: any completion order, drops, late loads, several replicas, both modes.

`simulate` plays generator, reward and trainer against a `Schedule`. It keeps the true versions of each group's tokens, apart from
what the schedule is told, and checks them when the group is trained on. The same simulation must find a violation as soon as one
rule is replaced by a plausible wrong one.
"""

import random
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from llamarl_jax.channels import ChannelClosed
from llamarl_jax.schedule import Schedule, ScheduleConfig, SharedSchedule, StalenessError, check_staleness


class FirstCompletedSchedule(Schedule):
    """The wrong batching rule: whatever completed first."""

    def _choose(self):
        batch = list(self._completed)[: self.config.groups_per_step]
        return batch if len(batch) == self.config.groups_per_step else None


@dataclass(frozen=True)
class Scenario:
    config: ScheduleConfig
    num_replicas: int
    start_version: int
    drop_percent: int
    source: random.Random = field(repr=False)


def scenarios(mode: str | None = None) -> st.SearchStrategy[Scenario]:
    def build(batch, staleness, chosen_mode, start, num_steps, replicas, drop_percent, source):
        config = ScheduleConfig(
            num_steps=start + num_steps,
            groups_per_step=batch,
            max_staleness=staleness,
            mode=chosen_mode,
            max_dropped_batches=1000,
        )
        return Scenario(config, replicas, start, drop_percent, source)

    modes = st.sampled_from(["boundary", "in_flight"]) if mode is None else st.just(mode)
    return st.builds(
        build,
        st.integers(1, 4),
        st.integers(0, 4),
        modes,
        st.integers(0, 3),
        st.integers(1, 9),
        st.integers(1, 3),
        st.sampled_from([0, 20, 50]),
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
        if self.scenario.config.mode == "boundary":
            if self.schedule.is_exhausted:
                return []
            target = self.schedule.round_version(self.schedule.open_round)
            return [(i, target) for i, loaded in enumerate(self.loaded) if loaded < target <= self.version]
        return [(i, version) for i, loaded in enumerate(self.loaded) for version in range(loaded + 1, self.version + 1)]

    def play(self) -> None:
        while self.version < self.scenario.config.num_steps:
            moves: list = [(self.load, load) for load in self.loadable()]
            moves += [(self.generate, index) for index, group in self.running.items() if not group.is_generated]
            moves += [(self.reward, index) for index, group in self.running.items() if group.is_generated]
            if self.schedule.num_admissible(self.told_version()) > 0:
                moves.append((self.admit, None))
            if self.batch_in_training is not None:
                moves.append((self.commit, None))
            elif (self.random.randrange(2) == 0 or not moves) and self.take():
                continue
            assert moves, f"deadlock at step {self.schedule.step}: {self.schedule.state()}"
            move, argument = self.random.choice(moves)
            move(argument)

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


def simulate(scenario: Scenario, schedule_class: type[Schedule] = Schedule, *, admit_by_trainer: bool = False) -> Run:
    schedule = schedule_class(scenario.config, start_version=scenario.start_version)
    run = Run(scenario, schedule, admit_by_trainer=admit_by_trainer)
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


@settings(max_examples=150, deadline=None)
@given(scenarios("boundary"), st.randoms(use_true_random=False))
def test_boundary_mode_does_not_depend_on_timing_and_samples_each_round_with_one_version(scenario, other_timing):
    first = simulate(scenario)
    second = simulate(Scenario(scenario.config, 1, scenario.start_version, scenario.drop_percent, other_timing))
    for round_index, (one, other) in enumerate(zip(first.tokens_of_batch, second.tokens_of_batch, strict=True), scenario.start_version):
        assert [index for index, _ in one] == [index for index, _ in other] == sorted(index for index, _ in one)
        expected = max(scenario.start_version, round_index - scenario.config.max_staleness)
        assert {version for _, versions in one + other for version in versions} == {expected}
    consumed = [index for batch in first.tokens_of_batch for index, _ in batch]
    assert consumed == sorted(consumed)


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


def test_simulation_finds_no_fault_in_the_rules_with_the_same_search():
    with pytest.raises(NoSuchExample):
        find(scenarios(), violates, settings=settings(FIND, max_examples=200))


def admit(schedule: Schedule, loaded_version: int) -> list[int]:
    return [schedule.admit(loaded_version).admission_index for _ in range(schedule.num_admissible(loaded_version))]


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
            for index in indices:
                schedule.complete(index)
            assert schedule.num_admissible(step) == 0
            assert schedule.next_batch() == tuple(indices)


def test_boundary_round_replaces_dropped_groups_before_the_next_round_opens():
    schedule = Schedule(ScheduleConfig(num_steps=4, groups_per_step=3, max_staleness=1, mode="boundary"))
    assert (schedule.open_round, schedule.round_version(0), schedule.round_deficit(0)) == (0, 0, 3)
    assert admit(schedule, 0) == [0, 1, 2]
    schedule.drop(1)
    schedule.complete(2)
    assert (schedule.num_admissible(0), schedule.round_deficit(0)) == (0, 1)  # group 0 may still be dropped: the wave is not settled
    schedule.drop(0)
    assert schedule.num_admissible(0) == 2
    assert admit(schedule, 0) == [3, 4]
    schedule.complete(4)
    assert schedule.next_batch() is None
    schedule.complete(3)
    assert (schedule.open_round, schedule.round_version(1)) == (1, 0)
    assert admit(schedule, 0) == [5, 6, 7]  # S = 1: the next round does not wait for the trainer
    assert schedule.next_batch() == (2, 3, 4)
    for index in (5, 6, 7):
        schedule.complete(index)
    assert (schedule.open_round, schedule.round_version(2), schedule.num_admissible(0)) == (2, 1, 0)
    assert schedule.num_admissible(1) == 3


def test_a_wave_that_is_admitted_slowly_is_neither_cut_nor_grown_by_drops():
    schedule = Schedule(ScheduleConfig(num_steps=2, groups_per_step=3, max_staleness=0, mode="boundary"))
    schedule.admit(0)
    schedule.drop(0)
    assert schedule.num_admissible(0) == 2
    schedule.complete(schedule.admit(0).admission_index)
    assert schedule.num_admissible(0) == 1


@pytest.mark.parametrize("mode", ["boundary", "in_flight"])
def test_resume_goes_on_with_steps_versions_and_indices(mode):
    schedule = Schedule(ScheduleConfig(num_steps=7, groups_per_step=2, max_staleness=1, mode=mode), start_version=5, start_dropped=3)
    assert (schedule.step, schedule.round_version(5), schedule.round_version(6)) == (5, 5, 5)
    assert admit(schedule, 5)[0] == 13
    schedule.complete(13)
    schedule.complete(14)
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
    ],
)
def test_config_errors_name_field_and_value(field_name, value, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**{field_name: value})


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
    schedule.complete(schedule.admit(0).admission_index)
    schedule.next_batch()
    with pytest.raises(
        ValueError, match=r"version 1 is loaded, but round 1 is sampled with exactly version 0; .*round_version\(open_round\)"
    ):
        schedule.admit(1)


def test_in_flight_mode_has_no_rounds():
    with pytest.raises(ValueError, match="mode 'in_flight' has no rounds; ask num_admissible"):
        _ = Schedule(IN_FLIGHT_2_2).open_round


def test_a_group_is_completed_or_dropped_once():
    schedule = Schedule(IN_FLIGHT_2_2)
    admit(schedule, 0)
    schedule.complete(0)
    for again in (schedule.complete, schedule.drop):
        with pytest.raises(ValueError, match=r"group 0 was completed before"):
            again(0)
    schedule.drop(1)
    for unknown in (1, 99):
        with pytest.raises(ValueError, match=rf"group {unknown} is not outstanding"):
            schedule.complete(unknown)


def drop_for_ever(schedule: Schedule) -> None:
    while True:
        schedule.drop(schedule.admit(0).admission_index)


def test_dropping_everything_ends_with_an_error_instead_of_forever():
    schedule = Schedule(ScheduleConfig(groups_per_step=2, max_staleness=0, max_dropped_batches=3))
    with pytest.raises(RuntimeError, match=r"7 groups were dropped while batch 0 was filled, .* = 3 × 2; check the reward and the filter"):
        drop_for_ever(schedule)


def test_no_batch_after_the_last():
    schedule = Schedule(ScheduleConfig(num_steps=1, groups_per_step=1))
    schedule.complete(schedule.admit(0).admission_index)
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
    batches, waits = [], []

    def generate():
        for round_index in range(20):
            version = shared.round_version(round_index)
            shared.wait_until(lambda s, r=round_index, v=version: s.open_round == r and s.step >= v, timeout_s=30, on_wait=waits.append)
            while shared.open_round == round_index and not shared.is_exhausted:
                if shared.num_admissible(version) == 0:
                    shared.wait_until(lambda s, r=round_index, v=version: s.open_round != r or s.num_admissible(v) > 0, timeout_s=30)
                else:
                    index = shared.admit(version).admission_index
                    shared.drop(index) if index % 5 == 0 else shared.complete(index)

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
