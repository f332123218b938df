"""Shapes in HLO text: `bf16[64,4096]{1,0}`, or a tuple of such; what stands in braces is layout and memory space.

Source: openxla.org/xla/shapes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
"""Element types whose name does not tell their size as the first number behind the letters does (f8e4m3fn: 8, s32: 32)."""

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


class HloTextError(ValueError):
    """The text is not an HLO module in a form that this parser knows; the message quotes the line."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Element type and dimensions of one array, and the memory space that it lives in (0: the device's own)."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def num_elements(self) -> int:
        """Product of the dimensions."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return -(-self.num_elements * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = ArrayShape | tuple["Shape", ...]
"""An array or a tuple of shapes."""


def bits(dtype: str) -> int:
    """Returns the bits of one element of an HLO type.

    Raises:
        HloTextError: there is no such type.
    """
    if dtype in BITS:
        return BITS[dtype]
    if (match := re.match(r"[fsu](\d+)", dtype)) is None:
        raise HloTextError(f"{dtype!r} is not an HLO element type; if XLA has a new one, add it to llamarl_jax.aot.shapes.BITS")
    return int(match[1])


def parse_shape(text: str) -> Shape:
    """Parses `bf16[64,4096]{1,0}` or a tuple of such.

    Raises:
        HloTextError: the text is no shape.
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return tuple(parse_shape(part) for part in split_top_level(text[1:-1]))
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise HloTextError(f"{text[:100]!r} is not an HLO shape")
    dims = tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)
    space = re.search(r"S\((\d+)\)", match[3] or "")
    return ArrayShape(match[1], dims, int(space[1]) if space else 0)


def leaves(shape: Shape) -> tuple[ArrayShape, ...]:
    """Returns the arrays of a shape in order."""
    return (shape,) if isinstance(shape, ArrayShape) else tuple(leaf for part in shape for leaf in leaves(part))


def num_bytes(shape: Shape) -> int:
    """Returns the bytes of all arrays of a shape."""
    return sum(leaf.num_bytes for leaf in leaves(shape))


def split_top_level(text: str) -> list[str]:
    """Splits at commas that are outside of all brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [part for part in (*parts, text[start:]) if part.strip()]
