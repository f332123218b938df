import dataclasses
from typing import Any

import pytest

from llamarl_jax.aot.compiler import Compiled
from llamarl_jax.aot.report import MemoryUse, Report, make_report
from tests.aot.programs import PROGRAMS, WIDE, is_weight, read_buffers, read_sample

GIB = 2**30


def report(name: str, **changes: Any) -> Report:
    compiled = Compiled(
        text=read_sample(name),
        buffer_assignment=read_buffers(name),
        argument_bytes=3 * GIB,
        output_bytes=2 * GIB,
        aliased_bytes=GIB,
        temporary_bytes=GIB // 2,
        warnings=("Involuntary full rematerialization. It goes on", "another"),
        compile_s=1.5,
    )
    arguments: dict[str, Any] = {"target": "a card", "card_bytes": 5 * GIB, "least_bytes": 1024}
    arguments |= {"mesh_shape": PROGRAMS[name].mesh_shape, "is_weight": is_weight, **changes}
    return make_report(compiled, name=name, **arguments)


def test_a_step_is_a_share_of_a_call():
    """Three turns of the loop, each two float32 products (rows 4, 64 × 32) and one all-reduce of [4, 64]; taken as three steps."""
    found = report("tensor_parallel_loop", steps=3)
    assert found.flops_per_step == {"f32": 2 * (2 * 4 * 64 * 32)}
    assert found.fp8_products_per_step == 0
    ((key, traffic),) = found.traffic_per_step.items()
    assert key == ("all-reduce", "tensor")
    assert (traffic.count, traffic.num_bytes, traffic.wire_bytes) == (1, 1024, 1536)
    assert found.custom_calls == {"__cublas$lt$matmul": 6}


def test_memory_is_held_against_the_card():
    found = report("float8")
    assert found.memory.peak == 4.5 * GIB
    assert found.fits
    full = dataclasses.replace(found, memory=MemoryUse(5 * GIB, 0, 0, 1))
    assert not full.fits
    assert "DOES NOT FIT" in full.describe()
    assert "memory 4.50 GiB of 5.00 GiB (arguments 3.00 GiB, outputs not aliased 1.00 GiB, temporaries 0.50 GiB)" in found.describe()


def test_copies_of_weights_are_counted_in_bytes_and_described():
    found = report("stacked_layers")
    assert found.weight_copy_bytes_per_step == 3 * 2 * WIDE * WIDE
    assert "3 weights made bf16[1,512,512] by copy+dynamic-slice, 0.5 MiB each" in found.describe()
    assert report("listed_layers").weight_copies == ()


def test_arguments_are_found_by_name():
    found = report("float8")
    assert [p.name for p in found.arguments("params")] == ["params['kernel']", "params['kernel_scale']"]
    assert found.arguments("state") == ()
    assert found.fp8_products_per_step == 1


def test_warnings_and_unknown_loops_are_described():
    found = report("float8")
    assert found.rematerialisations == ("Involuntary full rematerialization. It goes on",)
    assert "warning: another" in found.describe()
    described = dataclasses.replace(found, unknown_trip_counts=("while.1",), products=()).describe()
    assert "the trip count of loop while.1 is not known; it counts once" in described
    assert "no products" in described


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_every_sample_can_be_read(name):
    found = report(name)
    assert found.unknown_trip_counts == ()
    assert name in found.describe()
