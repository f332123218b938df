"""Communication of a compiled program: each collective with its bytes, how often it runs, and the mesh axes that it runs over.

XLA names the devices of a collective by their position in the mesh's flattened device order, in one of three notations (here for the
axis `data` of a mesh data 2 × tensor 4):

| notation | example |
|---|---|
| groups | `{{0,4},{1,5},{2,6},{3,7}}` |
| iota: reshape, transpose and cut 0 … n − 1 into rows | `[4,2]<=[2,4]T(1,0)` |
| axes of a mesh of XLA's own, sometimes over reordered devices | `mesh['axis_0'=2,'axis_1'=4] {'axis_0'}` |

A collective-permute has pairs instead. The axes are those whose coordinate differs between members of a group. An asynchronous start and
its done count once.

Bytes are those of the whole value on one device: what an all-reduce reduces, an all-gather returns, a reduce-scatter takes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarl_jax.aot.hlo import Computation, Instruction, Program, result_shape
from llamarl_jax.aot.shapes import HloTextError, leaves

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_SUB_AXIS = re.compile(r"'([\w.]+)'(?::\((\d+)\)(\d+))?")

Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program.

    Attributes:
        axes: mesh axes that it runs over, in mesh order.
        group_size: devices that take part in one group.
        is_partial: the group is not all devices along `axes`, for instance 2 of 8.
        num_bytes: of the whole value on one device, in one execution.
        executions: in one call of the program.
        is_async: other work may run between start and done.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    is_partial: bool
    dtypes: tuple[str, ...]
    num_bytes: int
    executions: int
    is_async: bool
    name: str
    op_name: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution by a ring: 2(n − 1)/n of an all-reduce, (n − 1)/n of the others."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.num_bytes)
        share = (self.group_size - 1) / self.group_size
        return self.num_bytes * share * (2 if self.kind == "all-reduce" else 1)

    @property
    def axes_label(self) -> str:
        """The axes as text, with the size of the group where it is only a part of them."""
        label = "×".join(self.axes) or "none"
        return f"{label} ({self.group_size} of them)" if self.is_partial else label


def find_collectives(program: Program, mesh_shape: Mapping[str, int]) -> tuple[Collective, ...]:
    """Lists the collectives that run.

    Args:
        mesh_shape: axis → size of the mesh that the program was compiled for, in the order of its axes.

    Raises:
        HloTextError: the devices of a collective are in an unknown notation, or are not those of the mesh.
    """
    return tuple(
        _describe(computation, instruction, times, mesh_shape)
        for computation, instruction, times in program.executed()
        if _kind(instruction) is not None
    )


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _describe(computation: Computation, instruction: Instruction, times: int, mesh_shape: Mapping[str, int]) -> Collective:
    groups = parse_groups(instruction.attributes, math.prod(mesh_shape.values()))
    axes = axes_of(groups, mesh_shape)
    inputs = [leaf for name in instruction.operands for leaf in leaves(computation.instructions[name].shape)]
    outputs = leaves(result_shape(computation, instruction))
    is_permute = "source_target_pairs" in instruction.attributes
    size = math.prod(mesh_shape[a] for a in axes) if is_permute else len(groups[0])
    return Collective(
        kind=instruction.opcode.removesuffix("-start"),
        axes=axes,
        group_size=size,
        is_partial=size != math.prod(mesh_shape[a] for a in axes),
        dtypes=tuple(sorted({leaf.dtype for leaf in inputs})),
        num_bytes=max(sum(x.num_bytes for x in inputs), sum(x.num_bytes for x in outputs)),
        executions=times,
        is_async=instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes,
        name=instruction.name,
        op_name=instruction.op_name,
    )


def parse_groups(attributes: str, num_devices: int) -> Groups:
    """Returns the groups of devices (or the pairs) of a collective.

    Args:
        attributes: text behind the operands of the instruction.
        num_devices: of the mesh; an empty list of groups means all of them.

    Raises:
        HloTextError: the notation is unknown.
    """
    if match := _IOTA.search(attributes):
        ids = _iota(_ints(match[3]), _ints(match[4]))
        return _rows(ids, int(match[2]))
    if match := _MESH.search(attributes):
        return _mesh_groups(match[1], match[2], match[3], match[4])
    if match := _LISTS.search(attributes):
        groups = [tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", match[1])]
        return [group for group in groups if group] or [tuple(range(num_devices))]
    raise HloTextError(f"cannot read the devices of a collective in {attributes[:200]!r}")


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of the groups differ.

    Raises:
        HloTextError: a device is not in the mesh.
    """
    num_devices = math.prod(mesh_shape.values())
    varying = set()
    for group in groups:
        if max(group) >= num_devices:
            raise HloTextError(f"device {max(group)} of a collective is not in the mesh {dict(mesh_shape)}; give the program's own mesh")
        for device in group:
            pairs = zip(_coordinates(group[0], mesh_shape), _coordinates(device, mesh_shape), mesh_shape, strict=True)
            varying |= {axis for a, b, axis in pairs if a != b}
    return tuple(axis for axis in mesh_shape if axis in varying)


def _mesh_groups(sizes: str, order: str | None, permutation: str | None, axes: str) -> Groups:
    """Groups of a mesh of XLA's; `'axis':(p)k` is the part of size k of an axis behind a major part of size p."""
    shape = {name: int(size) for name, size in re.findall(r"'([\w.]+)'=(\d+)", sizes)}
    names, num_devices = list(shape), math.prod(shape.values())
    ids = _iota(_ints(order) if order else [num_devices], _ints(permutation))
    strides = {name: math.prod(shape[later] for later in names[i + 1 :]) for i, name in enumerate(names)}
    steps = []
    for name, major, size in _SUB_AXIS.findall(axes):
        count = int(size or shape[name])
        steps.append((strides[name] * (shape[name] // (int(major or 1) * count)), count))
    offsets = [sum(part) for part in itertools.product(*[[step * i for i in range(count)] for step, count in steps])]
    groups, seen = [], set()
    for first in range(num_devices):
        if first not in seen:
            members = [first + offset for offset in offsets]
            seen.update(members)
            groups.append(tuple(ids[m] for m in members))
    return groups


def _iota(shape: Sequence[int], permutation: Sequence[int]) -> list[int]:
    """Returns 0 … n − 1, reshaped to `shape`, transposed and flattened."""
    permutation = permutation or range(len(shape))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    places = itertools.product(*[range(shape[p]) for p in permutation])
    return [sum(i * strides[p] for i, p in zip(place, permutation, strict=True)) for place in places]


def _rows(ids: Sequence[int], size: int) -> Groups:
    return [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]


def _ints(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _coordinates(device: int, mesh_shape: Mapping[str, int]) -> list[int]:
    coordinates = []
    for size in reversed(list(mesh_shape.values())):
        device, coordinate = divmod(device, size)
        coordinates.append(coordinate)
    return coordinates[::-1]
