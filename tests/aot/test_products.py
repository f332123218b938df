import jax
import pytest

from llamarl_jax.aot.hlo import parse_program
from llamarl_jax.aot.products import Product, find_products
from llamarl_jax.aot.shapes import HloTextError
from tests.aot.programs import WIDE, compile_program, read_sample


def find(name: str) -> list[Product]:
    return list(find_products(parse_program(read_sample(name))))


def test_a_float8_product_of_hopper_is_a_bfloat16_one_with_converted_weights_and_a_float16_one_on_an_a100():
    found = {name: find(name)[0] for name in ("float8", "float8_weights_only", "float8_a100")}
    assert {name: (p.target, p.dtypes, p.is_fp8) for name, p in found.items()} == {
        "float8": ("__cublas$lt$matmul$f8", "f8e4m3fn", True),
        "float8_weights_only": ("__cublas$lt$matmul", "bf16", False),
        "float8_a100": ("__cublas$lt$matmul", "f16", False),
    }
    assert {p.flops for p in found.values()} == {2 * 16 * WIDE * WIDE}


@pytest.mark.parametrize("device", ["gpu sample", "cpu"])
def test_flops_are_counted_on_one_device_at_every_turn(device):
    text = compile_program("tensor_parallel_loop", jax.devices()).text if device == "cpu" else read_sample("tensor_parallel_loop")
    found = find_products(parse_program(text))
    # 8 rows over data 2, 64 × 128 over tensor 4, up and down.
    assert [(p.flops, p.executions) for p in found] == [(2 * 4 * 64 * 32, 3)] * 2
    assert {p.target for p in found} == {"dot" if device == "cpu" else "__cublas$lt$matmul"}


def test_products_with_different_types_name_both():
    text = """HloModule m

ENTRY %main (x: bf16[2,4], y: f8e4m3fn[3,4]) -> f32[2,3] {
  %x = bf16[2,4]{1,0} parameter(0)
  %y = f8e4m3fn[3,4]{1,0} parameter(1)
  ROOT %r = f32[2,3]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    (found,) = find_products(parse_program(text))
    assert (found.dtypes, found.is_fp8, found.flops) == ("bf16×f8e4m3fn", False, 2 * 2 * 3 * 4)
    with pytest.raises(HloTextError, match="cannot read what the product r contracts"):
        find_products(parse_program(text.replace("lhs_contracting_dims={1}", "nothing=1")))
