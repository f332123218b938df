"""Where completions go: free slots, and free rows for their prompts, on the same replica.

The completions of a prompt share a row, up to the number that may read one. With several replicas they go where there is room for most of
them, and stay together while there is: a prompt is prefilled on every replica that it has completions on. A row is free again when the last
of its completions has ended; until then its prompt is kept, however few read it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class PromptRow:
    """A row of the prompts' cache, from when a prompt takes it until its last completion leaves."""

    number: int
    replica: int
    num_members: int = 0


@dataclass(frozen=True)
class Seat:
    """A slot and the row of its prompt."""

    slot: int
    row: PromptRow


class Seats:
    """All slots and prompt rows of a decoder."""

    def __init__(self, *, num_slots: int, num_prompt_rows: int, most_members: int, num_replicas: int) -> None:
        """Starts with everything free.

        Args:
            num_slots, num_prompt_rows: multiples of the replicas, split over them in order.
            most_members: slots that may read one row.
        """
        self._most_members = most_members
        self._slots_per_replica, self._rows_per_replica = num_slots // num_replicas, num_prompt_rows // num_replicas
        self._slots = [_descending(self._slots_per_replica, replica) for replica in range(num_replicas)]
        self._rows = [_descending(self._rows_per_replica, replica) for replica in range(num_replicas)]

    @property
    def num_vacant(self) -> int:
        """Seats that completions of other prompts could take."""
        return sum(min(len(slots), len(rows) * self._most_members) for slots, rows in zip(self._slots, self._rows, strict=True))

    def take(self, rows: list[PromptRow], replicas: Collection[int] | None = None) -> Seat | None:
        """Returns a seat for one more completion of a prompt, or None if there is none.

        Args:
            rows: those that hold the prompt; one that is newly taken is appended.
            replicas: where the seat may be; None for anywhere.
        """
        allowed = [r for r, slots in enumerate(self._slots) if slots and (replicas is None or r in replicas)]
        for row in rows:
            if 0 < row.num_members < self._most_members and row.replica in allowed:
                return self._sit(row)
        own = {row.replica for row in rows if row.num_members}
        replica = max((r for r in allowed if self._rows[r]), key=lambda r: (r in own, len(self._slots[r])), default=None)
        if replica is None:
            return None
        rows.append(PromptRow(self._rows[replica].pop(), replica))
        return self._sit(rows[-1])

    def leave(self, seat: Seat) -> None:
        """Frees a slot, and its prompt's row if it was the last one that read it."""
        self._slots[seat.row.replica].append(seat.slot)
        seat.row.num_members -= 1
        if not seat.row.num_members:
            self._rows[seat.row.replica].append(seat.row.number)

    def _sit(self, row: PromptRow) -> Seat:
        row.num_members += 1
        return Seat(self._slots[row.replica].pop(), row)


def _descending(count: int, replica: int) -> list[int]:
    """Returns the numbers of one replica, the smallest last, where it is taken first."""
    return list(range(replica * count, (replica + 1) * count))[::-1]
