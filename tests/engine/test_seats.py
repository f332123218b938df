"""Slots and prompt rows are given out once, together on one replica, and come back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamarl_jax.engine.seats import PromptRow, Seat, Seats


class SeatsMachine(RuleBasedStateMachine):
    """Prompts come, take seats, and their completions leave in any order."""

    @initialize(num_replicas=st.integers(1, 3), slots=st.integers(1, 6), rows=st.integers(1, 4), most_members=st.integers(1, 4))
    def start(self, num_replicas: int, slots: int, rows: int, most_members: int):
        self.num_replicas, self.slots, self.rows, self.most_members = num_replicas, slots, rows, most_members
        self.seats = Seats(
            num_slots=slots * num_replicas, num_prompt_rows=rows * num_replicas, most_members=most_members, num_replicas=num_replicas
        )
        self.taken: list[tuple[int, Seat]] = []
        self.prompts: dict[int, list[PromptRow]] = {}

    @rule(prompt=st.integers(0, 5))
    def take(self, prompt: int):
        before = self.rows_in_use()
        seat = self.seats.take(self.prompts.setdefault(prompt, []))
        if seat is not None:
            self.taken.append((prompt, seat))
            return
        # Nothing is refused that could be had: no replica has a free slot along with a row, one of the prompt's own or a free one.
        for replica in range(self.num_replicas):
            has_slot = sum(s.row.replica == replica for _, s in self.taken) < self.slots
            has_row = sum(r.replica == replica for r in before.values()) < self.rows
            has_own = any(
                r.replica == replica and sum(s.row is r for _, s in self.taken) < self.most_members
                for r in {id(s.row): s.row for p, s in self.taken if p == prompt}.values()
            )
            assert not (has_slot and (has_row or has_own))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def leave(self, data):
        self.seats.leave(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))[1])

    def rows_in_use(self) -> dict[int, PromptRow]:
        return {seat.row.number: seat.row for _, seat in self.taken}

    @invariant()
    def no_slot_and_no_row_is_given_twice(self):
        slots = [seat.slot for _, seat in self.taken]
        assert len(set(slots)) == len(slots)
        prompts_of_row: dict[int, set[int]] = {}
        for prompt, seat in self.taken:
            assert seat.slot // self.slots == seat.row.number // self.rows == seat.row.replica
            prompts_of_row.setdefault(seat.row.number, set()).add(prompt)
        assert all(len(prompts) == 1 for prompts in prompts_of_row.values())
        assert all(sum(s.row.number == row for _, s in self.taken) <= self.most_members for row in prompts_of_row)

    @invariant()
    def vacancies_are_what_other_prompts_could_take(self):
        rows = self.rows_in_use()
        free = [
            (self.slots - sum(s.row.replica == r for _, s in self.taken), self.rows - sum(row.replica == r for row in rows.values()))
            for r in range(self.num_replicas)
        ]
        assert self.seats.num_vacant == sum(min(slots, rows * self.most_members) for slots, rows in free)


TestSeats = SeatsMachine.TestCase
TestSeats.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("most_members", "num_rows"), [(8, 1), (4, 2), (1, 8)])
def test_a_group_takes_as_few_rows_as_it_can(most_members, num_rows):
    seats = Seats(num_slots=16, num_prompt_rows=16, most_members=most_members, num_replicas=2)
    rows: list[PromptRow] = []
    assert all(seats.take(rows) for _ in range(8))
    assert len(rows) == num_rows


def test_with_a_row_for_every_slot_there_is_always_a_seat():
    seats = Seats(num_slots=6, num_prompt_rows=6, most_members=1, num_replicas=3)
    taken = [seats.take([]) for _ in range(6)]
    assert {seat.slot for seat in taken if seat} == set(range(6))
    assert seats.take([]) is None
