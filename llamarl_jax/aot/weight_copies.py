"""Weights that a compiled program copies, transposes, joins or converts when it runs, instead of reading them as they are stored.

Such work depends on nothing but the weights, so it could have been done once, in the export; in a decode step it is paid for every token.
Each value is followed from the program's arguments: it is *made of weights* if all that it depends on are weights and constants. Loops are
followed to a fixed point, so a value that a loop carries along unchanged stays what it was. An instruction that writes an array made of
weights is a copy, whatever it does; a product of weights with activations is not, nor is a collective (`collectives.py` lists those).
Of a dynamic slice only the array counts, not the index: cutting a layer out of stacked weights is a copy.

With products of float8 weights this also finds the silent fall-back: a kernel that is converted to bfloat16 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from llamarl_jax.aot.collectives import KINDS
from llamarl_jax.aot.hlo import FREE, Computation, Instruction, Parameter, Program, called_computations, result_shape
from llamarl_jax.aot.shapes import Shape, leaves

TELLING = ("transpose", "concatenate", "convert", "copy", "dynamic-slice", "slice", "dynamic-update-slice", "pad", "gather", "multiply")
"""Opcodes that say what a fusion does to a weight."""
_UNKNOWN = frozenset({"rng", "rng-bit-generator", "rng-get-and-update-state", "infeed", "recv"})
_CONTAINERS = frozenset({"while", "call", "conditional", "async-start"})
_ONLY_DATA = {"dynamic-slice": 1, "dynamic-update-slice": 2}
"""Opcodes of which only the first operands are data, the others indices."""

Origin = frozenset[int] | None
"""Numbers of the arguments that an array is made of, or None if other things than weights and constants go into it."""
Value = Origin | tuple["Value", ...]


@dataclass(frozen=True)
class WeightCopy:
    """One array made of weights that the program writes.

    Attributes:
        kind: what is done, such as `transpose` or `convert+multiply`.
        weights: names of the arguments that it is made of.
        num_bytes: written in one execution.
        executions: in one call of the program.
    """

    kind: str
    weights: tuple[str, ...]
    result: str
    num_bytes: int
    executions: int
    name: str
    op_name: str


def find_weight_copies(program: Program, is_weight: Callable[[Parameter], bool], *, least_bytes: int = 1 << 20) -> tuple[WeightCopy, ...]:
    """Lists the copies of weights that run.

    Args:
        is_weight: which arguments are weights; all others count as activations.
        least_bytes: smaller arrays, and arrays made of smaller weights only, are left out.
    """
    large = {p.number for p in program.parameters if is_weight(p) and p.num_bytes >= least_bytes}
    found: list[WeightCopy] = []

    def record(computation: Computation, instruction: Instruction, value: Value, times: int) -> None:
        arrays = leaves(result_shape(computation, instruction))
        if instruction.opcode == "copy-start":
            arrays = leaves(instruction.shape)[:1]
        for array, origin in zip(arrays, _flatten(value), strict=False):
            if origin and array.num_bytes >= least_bytes and origin & large:
                names = tuple(program.parameters[number].name for number in sorted(origin))
                kind, name = _kind(program, instruction), instruction.name
                found.append(WeightCopy(kind, names, str(array), array.num_bytes, times, name, instruction.op_name))

    arguments = [_fill(p.shape, frozenset({p.number}) if is_weight(p) else None) for p in program.parameters]
    _Flow(program, record).run(program.entry, arguments, 1, is_recorded=True)
    return tuple(found)


class _Flow:
    """Follows values through computations; each call of a computation is followed with its own arguments."""

    def __init__(self, program: Program, record: Callable[[Computation, Instruction, Value, int], None]) -> None:
        self._program, self._record = program, record

    def run(self, computation: Computation, arguments: Sequence[Value], times: int, *, is_recorded: bool) -> Value:
        """Returns the value of the root; records what is written on the way, `times` being the executions of the computation."""
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            operands = [values[name] for name in instruction.operands if name in values]
            value = self._evaluate(instruction, operands, arguments, times, is_recorded=is_recorded)
            values[instruction.name] = value
            if is_recorded and _writes(instruction):
                self._record(computation, instruction, value, times)
        return values[computation.root.name]

    def _evaluate(
        self, instruction: Instruction, operands: list[Value], arguments: Sequence[Value], times: int, *, is_recorded: bool
    ) -> Value:
        opcode = instruction.opcode
        if opcode == "parameter":
            return arguments[int(instruction.arguments)]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return _element(operands[0], int(instruction.attributes.partition("index=")[2].split(",")[0]))
        if opcode == "while":
            return self._loop(instruction, operands[0], times, is_recorded=is_recorded)
        if opcode == "conditional":
            names = called_computations(instruction)
            branches = [self._call(n, [v], times, is_recorded=is_recorded) for n, v in zip(names, operands[1:], strict=True)]
            return _join_all(branches)
        if called := called_computations(instruction):
            # What a fusion computes inside is not written to memory.
            return self._call(called[0], operands, times, is_recorded=is_recorded and opcode != "fusion")
        if opcode.endswith("-done"):
            return operands[0]
        data = operands[: _ONLY_DATA.get(opcode, len(operands))]
        origin = None if opcode in _UNKNOWN else _union(_flatten(tuple(data)))
        return _fill(instruction.shape, origin) if not opcode.endswith("-start") else origin

    def _call(self, name: str, arguments: Sequence[Value], times: int, *, is_recorded: bool) -> Value:
        return self.run(self._program.computations[name], arguments, times, is_recorded=is_recorded)

    def _loop(self, instruction: Instruction, carry: Value, times: int, *, is_recorded: bool) -> Value:
        (body,) = called_computations(instruction)
        while (joined := _join(carry, self._call(body, [carry], times, is_recorded=False))) != carry:
            carry = joined
        if is_recorded:
            self._call(body, [carry], times * (instruction.trip_count or 1), is_recorded=True)
        return carry


def _writes(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    is_collective = opcode.removesuffix("-start") in KINDS
    return opcode not in FREE and opcode not in _CONTAINERS and not opcode.endswith("-done") and not is_collective


def _kind(program: Program, instruction: Instruction) -> str:
    if instruction.opcode != "fusion":
        return instruction.target or instruction.opcode.removesuffix("-start")
    inside = {i.opcode for name in called_computations(instruction) for i in program.computations[name].instructions.values()}
    return "+".join(opcode for opcode in TELLING if opcode in inside) or "fusion"


def _fill(shape: Shape, origin: Origin) -> Value:
    return tuple(_fill(part, origin) for part in shape) if isinstance(shape, tuple) else origin


def _flatten(value: Value) -> Iterable[Origin]:
    if not isinstance(value, tuple):
        return [value]
    return [leaf for part in value for leaf in _flatten(part)]


def _element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) else value


def _union(origins: Iterable[Origin]) -> Origin:
    union: frozenset[int] = frozenset()
    for origin in origins:
        if origin is None:
            return None
        union |= origin
    return union


def _join(a: Value, b: Value) -> Value:
    """Returns what holds for a value that is a at one time and b at another."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(_join(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple):
        return tuple(_join(x, b) for x in a)
    if isinstance(b, tuple):
        return tuple(_join(a, y) for y in b)
    return _union([a, b])


def _join_all(values: Sequence[Value]) -> Value:
    joined = values[0]
    for value in values[1:]:
        joined = _join(joined, value)
    return joined


def total_bytes(copies: Iterable[WeightCopy]) -> int:
    """Returns the bytes that all executions of all copies write in one call."""
    return sum(copy.num_bytes * copy.executions for copy in copies)
