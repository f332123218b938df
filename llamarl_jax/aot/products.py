"""FLOPs of a compiled program's matrix products: `dot` instructions and calls of cuBLAS, float8 ones told apart.

2 · (elements of the result) · (product of the contracted sizes), as the program executes it: what the compiler pads is counted.
Elementwise work, softmax and cuDNN's fused attention are not products here; `Product.target` and `Report.custom_calls` show what there is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from llamarl_jax.aot.hlo import Computation, Instruction, Program
from llamarl_jax.aot.shapes import ArrayShape, HloTextError, leaves

FP8_TYPES = ("f8e4m3fn", "f8e5m2")
_CONTRACTED = (re.compile(r"lhs_contracting_dims=\{([\d,]*)\}"), re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]'))


@dataclass(frozen=True)
class Product:
    """One matrix product.

    Attributes:
        target: custom-call target, or `dot`.
        flops: of one execution on one device.
        executions: in one call of the program.
    """

    target: str
    left: ArrayShape
    right: ArrayShape
    result: ArrayShape
    flops: int
    executions: int
    op_name: str

    @property
    def dtypes(self) -> str:
        """Types of both operands, once if they are equal."""
        return self.left.dtype if self.left.dtype == self.right.dtype else f"{self.left.dtype}×{self.right.dtype}"

    @property
    def is_fp8(self) -> bool:
        """Whether both operands are float8 and the multiplication is too."""
        return self.left.dtype in FP8_TYPES and self.right.dtype in FP8_TYPES


def find_products(program: Program) -> tuple[Product, ...]:
    """Lists the matrix products that run.

    Raises:
        HloTextError: the text does not say what a product contracts.
    """
    return tuple(_describe(*executed) for executed in program.executed() if _is_product(executed[1]))


def _is_product(instruction: Instruction) -> bool:
    return instruction.opcode == "dot" or "matmul" in instruction.target or "gemm" in instruction.target


def _describe(computation: Computation, instruction: Instruction, times: int) -> Product:
    shapes = [leaves(computation.instructions[name].shape) for name in instruction.operands[:2]]
    contracted = next((m for pattern in _CONTRACTED if (m := pattern.search(instruction.attributes))), None)
    if len(shapes) < 2 or contracted is None:
        raise HloTextError(f"cannot read what the product {instruction.name} contracts: {instruction.attributes[:200]!r}")
    left, right, result = shapes[0][0], shapes[1][0], leaves(instruction.shape)[0]
    depth = math.prod(left.dims[int(dim)] for dim in re.findall(r"\d+", contracted[1]))
    target = instruction.target or instruction.opcode
    return Product(target, left, right, result, 2 * result.num_elements * depth, times, instruction.op_name)
