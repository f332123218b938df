"""Reads the text of an optimised HLO module: computations, instructions with shapes, loops with trip counts, aliased arguments.

An instruction inside a loop runs as often as the loop turns, so every count here is of executions in one call of the program:
`Program.executed()` walks from the entry into loop bodies (times their known trip count), calls, branches, fusions and asynchronous
computations. Scalar computations of reductions (`to_apply`) are not visited. A loop whose trip count the compiler does not know counts
once, and is listed in `unknown_trip_counts`.

The grammar is that of XLA's `HloModule::ToString`, as `jax.stages.Compiled.as_text()` returns it for CPU and GPU:

    %name = bf16[64,4096]{1,0} opcode(%operand, …), attribute=…, metadata={op_name="…"}, backend_config={…}

Source: openxla.org/xla/operation_semantics, and texts of jax 0.10.2 and 0.12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from llamarl_jax.aot.shapes import HloTextError, Shape, num_bytes, parse_shape

FREE = frozenset({"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "opt-barrier", "after-all", "partition-id"})
"""Opcodes that write no array of their own."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `arguments` is what stands between the parentheses, `attributes` what follows them."""

    name: str
    shape: Shape
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(_NAME.findall(self.arguments))

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return num_bytes(self.shape)

    @property
    def op_name(self) -> str:
        """Path of named scopes and primitives in the JAX program; for a parameter the argument's name; empty if there is none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    @property
    def target(self) -> str:
        """Target of a custom call, or an empty string."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def computations(self, key: str) -> tuple[str, ...]:
        """Returns the computations that an attribute such as `calls` or `branch_computations` names."""
        match = re.search(rf"(?:^|[ ,]){key}=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
        return tuple(name.strip().lstrip("%") for name in (match[1] or match[2]).split(",")) if match else ()

    @property
    def trip_count(self) -> int | None:
        """How often a loop turns, if the compiler knows."""
        match = _TRIP_COUNT.search(self.attributes)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text, which is the order of execution if the module is scheduled."""

    name: str
    instructions: dict[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions.values() if i.is_root), list(self.instructions.values())[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters in the order of their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.arguments)))


@dataclass(frozen=True)
class Parameter:
    """An argument of the program.

    Attributes:
        name: of the argument in the JAX program, such as `params['embed']['embedding']`.
        aliased_output: index of the output that takes its memory over, None if it is not donated.
    """

    number: int
    name: str
    shape: Shape
    aliased_output: tuple[int, ...] | None

    @property
    def num_bytes(self) -> int:
        """Bytes on one device."""
        return num_bytes(self.shape)


@dataclass(frozen=True)
class Program:
    """A parsed module."""

    computations: dict[str, Computation]
    entry: Computation
    aliases: dict[int, tuple[int, ...]]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Arguments by number."""
        found = enumerate(self.entry.parameters)
        return tuple(Parameter(number, p.op_name or p.name, p.shape, self.aliases.get(number)) for number, p in found)

    @cached_property
    def _counted(self) -> tuple[dict[str, int], tuple[str, ...]]:
        executions: dict[str, int] = dict.fromkeys(self.computations, 0)
        unknown: dict[str, None] = {}

        def visit(computation: Computation, times: int) -> None:
            executions[computation.name] += times
            for instruction in computation.instructions.values():
                turns = instruction.trip_count if instruction.opcode == "while" else 1
                if turns is None:
                    unknown[instruction.name], turns = None, 1
                for name in called_computations(instruction):
                    visit(self.computations[name], times * turns)

        visit(self.entry, 1)
        return executions, tuple(unknown)

    @property
    def unknown_trip_counts(self) -> tuple[str, ...]:
        """Loops that were counted as one turn because their trip count is not in the text."""
        return self._counted[1]

    def executed(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Yields each instruction that runs, with its computation and how often it runs in one call; branches count as taken."""
        for name, times in self._counted[0].items():
            if times:
                for instruction in self.computations[name].instructions.values():
                    yield self.computations[name], instruction, times

    def executions(self, computation: str) -> int:
        """Returns how often a computation runs in one call."""
        return self._counted[0][computation]


def result_shape(computation: Computation, instruction: Instruction) -> Shape:
    """Returns the shape of the result alone: of an asynchronous start, which carries its operands along, that of its done."""
    if not instruction.opcode.endswith("-start"):
        return instruction.shape
    done = instruction.opcode.removesuffix("start") + "done"
    found = (i.shape for i in computation.instructions.values() if i.opcode == done and instruction.name in i.operands)
    return next(found, instruction.shape)


def called_computations(instruction: Instruction) -> tuple[str, ...]:
    """Returns the computations that run as a part of an instruction: of a loop its body, not its condition."""
    keys: tuple[str, ...] = ()
    match instruction.opcode:
        case "while":
            keys = ("body",)
        case "fusion" | "async-start":  # async-update and -done may name the same computation again
            keys = ("calls",)
        case "call":
            keys = ("to_apply",)
        case "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
    return tuple(name for key in keys for name in instruction.computations(key))


def parse_program(text: str) -> Program:
    """Parses what `Compiled.as_text()` returns.

    Raises:
        HloTextError: there is no entry computation, or a line is not understood.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for raw in text.splitlines():
        if current is None:
            if raw.endswith("{") and (match := _COMPUTATION.match(raw)):
                current = computations[match[2]] = Computation(match[2], {})
                entry = current if match[1] else entry
        elif raw.startswith("}"):
            current = None
        elif raw.strip():
            instruction = parse_instruction(raw)
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise HloTextError("the text has no ENTRY computation; give what jax.stages.Compiled.as_text() returns")
    return Program(computations, entry, _parse_aliases(text.partition("\n")[0]))


def parse_instruction(line: str) -> Instruction:
    """Parses one line of a computation.

    Raises:
        HloTextError: the line is no instruction.
    """
    text = _COMMENT.sub("", line).strip()
    is_root = text.startswith("ROOT ")
    name, equals, rest = text.removeprefix("ROOT ").partition(" = ")
    end = _end_of_brackets(rest, 0) if rest.startswith("(") else rest.find(" ")
    opening = rest.find("(", end + 1)
    if not equals or end < 0 or opening < 0:
        raise HloTextError(f"cannot read the HLO instruction {line.strip()[:200]!r}")
    closing = _end_of_brackets(rest, opening)
    shape, opcode = parse_shape(rest[:end]), rest[end:opening].strip()
    return Instruction(name.lstrip("%"), shape, opcode, rest[opening + 1 : closing - 1], rest[closing:].lstrip(", "), is_root)


def _end_of_brackets(text: str, start: int) -> int:
    """Returns the position behind the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise HloTextError(f"a bracket is not closed in the HLO text {text[start : start + 100]!r}")


def _parse_aliases(header: str) -> dict[int, tuple[int, ...]]:
    """Returns parameter number → output index of the module's input_output_alias, which ends with the entry's last `)`."""
    entries = header.partition("input_output_alias={")[2].partition(") }")[0]
    return {int(number): tuple(int(i) for i in output.split(",") if i.strip()) for output, number in _ALIAS.findall(entries)}
