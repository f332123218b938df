import jax
import jax.numpy as jnp
import pytest

from llamarl_jax.bench.hlo_text import Instruction
from llamarl_jax.bench.op_profile import BETWEEN, Interval, exclusive_durations, profile_ops, summarise

NUM_STEPS = 4


@jax.jit
def _steps(x, w):
    def step(x, _):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    return jax.lax.scan(step, x, None, length=NUM_STEPS)[0]


def test_a_real_trace_names_the_product_by_its_scope():
    x, w = jnp.ones((64, 512)), jnp.ones((512, 512))
    jax.block_until_ready(_steps(x, w))
    ops = profile_ops(lambda: jax.block_until_ready(_steps(x, w)), NUM_STEPS)
    products = [op for op in ops if "dot" in op["name"] and "mlp/dot_general" in op["name"]]
    assert products
    assert products[0]["calls"] == pytest.approx(1)
    assert products[0]["step_ms"] > 0
    assert all(op["share"] <= 1 for op in ops)


def test_executions_are_added_up_by_content_and_containers_left_out():
    instructions = {
        ("m", "dot.1"): Instruction("dot", "dot f32[2] mlp"),
        ("m", "dot.2"): Instruction("dot", "dot f32[2] mlp"),
        ("m", "loop"): Instruction("while", "while"),
    }
    intervals = [
        Interval("m", "loop", 0, 100),
        Interval("m", "dot.1", 0, 40),
        Interval("m", "dot.2", 40, 60),
        Interval("m", "add", 80, 100),
    ]
    ops = summarise(intervals, instructions, num_steps=2)
    assert [(op["name"], op["share"], op["calls"]) for op in ops] == [
        ("dot f32[2] mlp", 0.6, 1.0),
        ("add", 0.2, 0.5),
        (BETWEEN, 0.2, 0.0),
    ]
    assert ops[0]["step_ms"] == pytest.approx(60 / 1e6 / 2)
    assert summarise([], {}, 1) == []


def test_time_in_which_several_run_is_that_of_the_one_which_began_last():
    intervals = [Interval("m", "a", 0, 10), Interval("m", "b", 5, 12), Interval("m", "c", 6, 7), Interval("m", "d", 20, 21)]
    assert exclusive_durations(intervals) == [5, 6, 1, 1]
    nested = [Interval("m", "outer", 0, 10), Interval("m", "inner", 2, 9), Interval("m", "empty", 3, 3)]
    assert exclusive_durations(nested) == [3, 7, 0]
    assert exclusive_durations([]) == []
