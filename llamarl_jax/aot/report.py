"""One record of what the compiler made of a program: memory against the card, products, communication, copies of weights, warnings.

Counts and bytes are those of one device in one call of the program. A call may hold several steps (the decoder runs `decode_steps_per_call`
in a loop); `steps` says how many, and `per_step` divides.

An out-of-memory program compiles like any other: `fits` is the check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llamarl_jax.aot.buffers import Temporary, parse_temporaries
from llamarl_jax.aot.collectives import Collective, find_collectives
from llamarl_jax.aot.compiler import Compiled
from llamarl_jax.aot.hlo import Parameter, parse_program
from llamarl_jax.aot.products import Product, find_products
from llamarl_jax.aot.weight_copies import WeightCopy, find_weight_copies

REMATERIALISATION = "Involuntary full rematerialization"
"""How XLA's warning begins when it gathers a whole array because it cannot go from one sharding to the next."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device; `aliased` are outputs that take over the memory of donated arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Arguments + outputs − aliased + temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes: how many run and how many bytes they hold, in one step."""

    count: float
    num_bytes: float
    wire_bytes: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler made of one program.

    Attributes:
        mesh_shape: axis → size.
        steps: of one call.
        card_bytes: memory of the card.
        temporaries: the large ones, largest first; they may share memory.
        custom_calls: target → executions in one call.
        warnings: of the compiler.
        lower_s, compile_s: seconds of tracing and of compiling.
    """

    name: str
    target: str
    mesh_shape: Mapping[str, int]
    steps: int
    card_bytes: int
    memory: MemoryUse
    parameters: tuple[Parameter, ...]
    temporaries: tuple[Temporary, ...]
    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]
    weight_copies: tuple[WeightCopy, ...]
    custom_calls: Mapping[str, int]
    unknown_trip_counts: tuple[str, ...]
    warnings: tuple[str, ...]
    lower_s: float
    compile_s: float
    text: str = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the program fits the memory of the card, with nothing else in it."""
        return self.memory.peak <= self.card_bytes

    @property
    def flops_per_step(self) -> dict[str, float]:
        """FLOPs of the matrix products of one step by the types of their operands."""
        total: Counter[str] = Counter()
        for product in self.products:
            total[product.dtypes] += product.flops * product.executions
        return {dtypes: flops / self.steps for dtypes, flops in total.items()}

    @property
    def fp8_products_per_step(self) -> float:
        """Products of float8 with float8 in one step."""
        return sum(product.executions for product in self.products if product.is_fp8) / self.steps

    @property
    def traffic_per_step(self) -> dict[tuple[str, str], Traffic]:
        """Collectives of one step by kind and mesh axes."""
        found: dict[tuple[str, str], Traffic] = {}
        for c in self.collectives:
            old, times = found.get((c.kind, c.axes_label), Traffic(0, 0, 0)), c.executions / self.steps
            new = Traffic(old.count + times, old.num_bytes + times * c.num_bytes, old.wire_bytes + times * c.wire_bytes)
            found[c.kind, c.axes_label] = new
        return found

    @property
    def weight_copy_bytes_per_step(self) -> float:
        """Bytes of copies of weights that one step writes."""
        return sum(copy.num_bytes * copy.executions for copy in self.weight_copies) / self.steps

    @property
    def rematerialisations(self) -> tuple[str, ...]:
        """Warnings that an array is gathered whole between two shardings."""
        return tuple(warning for warning in self.warnings if REMATERIALISATION in warning)

    def arguments(self, prefix: str) -> tuple[Parameter, ...]:
        """Returns the program's arguments whose name starts with `prefix`, such as `state.cache`."""
        return tuple(parameter for parameter in self.parameters if parameter.name.startswith(prefix))

    def describe(self) -> str:
        """Returns the record as some lines of text."""
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh_shape.items())
        heading = f"{self.name} on {self.target}, {mesh}: traced in {self.lower_s:.1f} s, compiled in {self.compile_s:.1f} s"
        return "\n".join(
            [heading, *(f"  {line}" for line in (*self._describe_memory(), *self._describe_step(), *self._describe_warnings()))]
        )

    def _describe_memory(self) -> list[str]:
        memory, verdict = self.memory, "" if self.fits else ": DOES NOT FIT"
        parts = {
            "arguments": memory.arguments,
            "outputs not aliased": memory.outputs - memory.aliased,
            "temporaries": memory.temporaries,
        }
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
        largest = [f"temporary {_gib(t.num_bytes)} {t.shape} {t.name} {t.op_name}".rstrip() for t in self.temporaries[:3]]
        return [f"memory {_gib(memory.peak)} of {_gib(self.card_bytes)}{verdict} ({listed})", *largest]

    def _describe_step(self) -> list[str]:
        flops = ", ".join(f"{value / 1e9:,.1f} GFLOP {dtypes}" for dtypes, value in self.flops_per_step.items()) or "no products"
        lines = [f"a step: {flops}; {self.fp8_products_per_step:g} float8 products"]
        for (kind, axes), traffic in self.traffic_per_step.items():
            lines.append(f"a step: {traffic.count:g} {kind} over {axes}, {traffic.num_bytes / 2**20:,.2f} MiB")
        copies: Counter[tuple[str, str, int]] = Counter()
        for copy in self.weight_copies:
            copies[copy.kind, copy.result, copy.num_bytes] += copy.executions
        for (kind, result, num_bytes), times in copies.items():
            lines.append(f"a step: {times / self.steps:g} weights made {result} by {kind}, {num_bytes / 2**20:,.1f} MiB each")
        return lines

    def _describe_warnings(self) -> list[str]:
        unknown = [f"the trip count of loop {name} is not known; it counts once" for name in self.unknown_trip_counts]
        return [f"warning: {warning[:300]}" for warning in (*self.warnings, *unknown)]


def make_report(
    compiled: Compiled,
    *,
    name: str,
    target: str,
    card_bytes: int,
    mesh_shape: Mapping[str, int],
    is_weight: Callable[[Parameter], bool],
    steps: int = 1,
    lower_s: float = 0.0,
    least_bytes: int = 1 << 20,
) -> Report:
    """Reads a compiled program.

    Args:
        is_weight: which arguments are weights, for the copies of them.
        steps: that one call makes.
        least_bytes: smaller temporaries and copies are left out.
    """
    program = parse_program(compiled.text)
    custom_calls: Counter[str] = Counter()
    for _, instruction, times in program.executed():
        if instruction.opcode == "custom-call":
            custom_calls[instruction.target] += times
    return Report(
        name=name,
        target=target,
        mesh_shape=dict(mesh_shape),
        steps=steps,
        card_bytes=card_bytes,
        memory=MemoryUse(compiled.argument_bytes, compiled.output_bytes, compiled.aliased_bytes, compiled.temporary_bytes),
        parameters=program.parameters,
        temporaries=parse_temporaries(compiled.buffer_assignment, program, least_bytes=least_bytes),
        collectives=find_collectives(program, mesh_shape),
        products=find_products(program),
        weight_copies=find_weight_copies(program, is_weight, least_bytes=least_bytes),
        custom_calls=dict(custom_calls),
        unknown_trip_counts=program.unknown_trip_counts,
        warnings=compiled.warnings,
        lower_s=lower_s,
        compile_s=compiled.compile_s,
        text=compiled.text,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
