"""Reads the text of a compiled program (HLO): what each operation does, in one line that is equal for equal work.

The line has the opcodes that matter (of a custom call, its target), for a product or a custom call the shape of its largest operand (the
kernel or the cache), the result's shape, and the named scopes of the source:

    dot f32[1536,576] = f32[64,1536] mlp/dot_general
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

CONTAINERS = {"while", "call", "conditional"}
"""Operations whose time is that of others."""
TELLING = ("dot", "custom-call", "reduce", "dynamic-update-slice", "gather", "scatter", "exponential", "copy", "transpose", "convert")
"""Opcodes that are worth naming inside a fusion; the rest is elementwise."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+|\([^=]*?\)) ([\w-]+)\(([^)]*)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")  # such as /*index=5*/ in a long tuple
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_PLUMBING = re.compile(r"^(?:jit\(.*\)|while|body|closed_call|cond|vmap\(.*\)|pjit)$")


@dataclass(frozen=True)
class Instruction:
    """What the compiled program says of one operation."""

    opcode: str
    label: str

    @property
    def is_container(self) -> bool:
        """Tells whether its time is that of other operations."""
        return self.opcode in CONTAINERS


@dataclass(frozen=True)
class _Line:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    called: str | None
    target: str | None
    scope: str | None


def parse_hlo(text: str) -> dict[str, Instruction]:
    """Returns the operations of a compiled program by name."""
    bodies: dict[str, list[_Line]] = {}
    body: list[_Line] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            body = bodies.setdefault(match[1], [])
        elif parsed := _parse(line):
            body.append(parsed)
    shapes = {line.name: line.shape for lines in bodies.values() for line in lines}
    return {line.name: _describe(line, bodies, shapes) for lines in bodies.values() for line in lines}


def _parse(text: str) -> _Line | None:
    text = _COMMENT.sub("", text)
    match = _INSTRUCTION.match(text)
    if match is None:
        return None
    called, target, name = (pattern.search(text) for pattern in (_CALLED, _TARGET, _NAME))
    operands = tuple(re.findall(r"%([\w.-]+)", match[4]))
    shape = re.sub(r"\{[^}]*\}", "", match[2])
    scope = _without_plumbing(name[1]) if name else None
    return _Line(match[1], shape, match[3], operands, called[1] if called else None, target[1] if target else None, scope)


def _describe(line: _Line, bodies: dict[str, list[_Line]], shapes: dict[str, str]) -> Instruction:
    inside = [line]
    if line.opcode in ("fusion", "call") and line.called in bodies:
        inside = bodies[line.called]
    opcodes = [inner.opcode for inner in inside]
    counted = [f"{opcodes.count(name)} {name}" if opcodes.count(name) > 1 else name for name in TELLING if name in opcodes]
    kind = line.target or " + ".join(counted) or ("elementwise" if line.opcode == "fusion" else line.opcode)
    products = [inner for inner in inside if inner.opcode == "dot" or inner.target]
    operands = sorted({max((shapes.get(name, "") for name in product.operands), key=_size) for product in products})
    scopes = sorted({product.scope for product in products if product.scope}) or ([line.scope] if line.scope else [])
    # A call with telling work in it is a loop over threads, not a container.
    opcode = "fusion" if line.opcode == "call" and counted else line.opcode
    words = [kind, *([", ".join(operands[:3]), "="] if operands else []), line.shape, ", ".join(scopes[:3])]
    return Instruction(opcode, " ".join(filter(None, words)))


def _size(shape: str) -> int:
    """Returns the number of elements of a shape such as f32[3,4]."""
    return math.prod(int(number) for number in re.findall(r"\d+", shape.partition("[")[2]))


def _without_plumbing(scope: str) -> str:
    """Returns the named scopes of the source without the machinery of jit and scan."""
    return "/".join(part for part in scope.split("/") if not _PLUMBING.match(part))
