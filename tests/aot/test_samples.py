"""The kept texts against what the installed compiler writes today: each program is compiled anew and must lead to the same findings."""

from collections import Counter
from typing import Any

import pytest

from llamarl_jax.aot.buffers import parse_temporaries
from llamarl_jax.aot.collectives import find_collectives
from llamarl_jax.aot.hlo import parse_program
from llamarl_jax.aot.products import find_products
from llamarl_jax.aot.weight_copies import find_weight_copies
from tests.aot.programs import PROGRAMS, compile_for_target, is_weight, read_buffers, read_sample

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("gpu_compiler")]


def findings(name: str, text: str, buffers: str) -> dict[str, Any]:
    """What does not depend on names, order and scheduling."""
    program = parse_program(text)
    return {
        "parameters": [(p.name, str(p.shape), p.aliased_output) for p in program.parameters],
        "collectives": Counter((c.kind, c.axes, c.num_bytes, c.executions) for c in find_collectives(program, PROGRAMS[name].mesh_shape)),
        "products": Counter((p.target, p.dtypes, p.flops, p.executions) for p in find_products(program)),
        "weights": Counter((w.kind, w.weights, w.num_bytes, w.executions) for w in find_weight_copies(program, is_weight, least_bytes=1)),
        "temporaries": Counter(str(t.shape) for t in parse_temporaries(buffers, least_bytes=1 << 18)),
    }


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_compiled_anew_has_the_findings_of_the_sample(name):
    compiled = compile_for_target(name)
    assert findings(name, compiled.text, compiled.buffer_assignment) == findings(name, read_sample(name), read_buffers(name))


def test_a_sharding_that_the_partitioner_finds_no_way_for_is_warned_of():
    assert any("Involuntary full rematerialization" in w for w in compile_for_target("embedding_sharded_across").warnings)
    assert compile_for_target("tensor_parallel_loop").warnings == ()
