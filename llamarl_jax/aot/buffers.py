"""The temporaries of a compiled program, from the buffer assignment that XLA writes next to it when it is asked to dump.

Temporaries whose lives do not overlap share memory, so sizes do not add up; `offset` shows which ones lie on top of each other. The text
of the module alone does not say which results are written in place, the assignment does: a KV cache that is updated in place has no entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llamarl_jax.aot.hlo import Program
from llamarl_jax.aot.shapes import ArrayShape, HloTextError, parse_shape

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")


@dataclass(frozen=True)
class Temporary:
    """One array that lives in the program's temporary memory.

    Attributes:
        name: of the instruction that makes it.
        offset: bytes from the start of the temporary memory.
        op_name: where in the JAX program it comes from, if that is known.
    """

    name: str
    shape: ArrayShape
    num_bytes: int
    offset: int
    op_name: str = ""


def parse_temporaries(text: str, program: Program | None = None, *, least_bytes: int = 1 << 20) -> tuple[Temporary, ...]:
    """Lists the temporaries of at least `least_bytes`, largest first.

    Args:
        text: of the file `…-buffer-assignment.txt` of XLA's dump.
        program: for the origin of each.

    Raises:
        HloTextError: the text is no buffer assignment.
    """
    if not text.startswith("BufferAssignment:"):
        raise HloTextError(f"the text is no buffer assignment of XLA: {text[:100]!r}")
    op_names = {} if program is None else {i.name: i.op_name for c in program.computations.values() for i in c.instructions.values()}
    found: dict[tuple[str, int, str], Temporary] = {}
    is_temporary = False
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            is_temporary = "preallocated-temp" in allocation[2]
        elif is_temporary and (match := _VALUE.match(line)) and match[3] is None and int(match[4]) >= least_bytes:
            shape = parse_shape(re.sub(r"/\*.*?\*/", "", match[6]))
            if isinstance(shape, ArrayShape):  # of a tuple this is the table of pointers
                temporary = Temporary(match[1], shape, int(match[4]), int(match[5]), op_names.get(match[1], ""))
                found[match[1], temporary.offset, str(shape)] = temporary
    return tuple(sorted(found.values(), key=lambda t: (-t.num_bytes, t.offset, t.name)))


def as_large_as(temporaries: Iterable[Temporary], shapes: Iterable[ArrayShape]) -> tuple[Temporary, ...]:
    """Returns the temporaries with as many elements as one of the given arrays, such as copies of a KV cache in any type.

    Those of one dimension are left out; they are workspaces of cuBLAS, of a few round sizes.
    """
    sizes = {shape.num_elements for shape in shapes}
    return tuple(t for t in temporaries if t.shape.num_elements in sizes and len(t.shape.dims) > 1)
