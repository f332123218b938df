import pytest

from llamarl_jax.aot.hlo import parse_program
from llamarl_jax.aot.weight_copies import WeightCopy, find_weight_copies, total_bytes
from tests.aot.programs import WIDE, L, is_weight, read_sample

SQUARE = WIDE * WIDE


def find(text: str, least_bytes: int = 1024) -> tuple[WeightCopy, ...]:
    return find_weight_copies(parse_program(text), is_weight, least_bytes=least_bytes)


@pytest.mark.parametrize(
    ("name", "kind", "num_bytes", "executions"),
    [
        ("stacked_layers", "copy+dynamic-slice", 2 * SQUARE, L),
        ("separate_projections", "concatenate", 3 * 2 * SQUARE, 1),
        ("float8_weights_only", "convert", 2 * SQUARE, 1),
        ("float8_a100", "convert", 2 * SQUARE, 1),
        ("float8_stored_in_out", "transpose", SQUARE, 1),
    ],
)
def test_a_weight_that_is_not_read_as_it_is_stored_is_found(name, kind, num_bytes, executions):
    (found,) = copies = find(read_sample(name))
    assert (found.kind, found.num_bytes, found.executions) == (kind, num_bytes, executions)
    assert total_bytes(copies) == num_bytes * executions


@pytest.mark.parametrize("name", ["listed_layers", "float8", "tensor_parallel_loop", "cache_in_place"])
def test_weights_that_are_read_as_they_are_stored_are_not(name):
    assert find(read_sample(name)) == ()


def test_the_weights_that_are_joined_are_named():
    (found,) = find(read_sample("separate_projections"))
    assert found.weights == ("params['k']", "params['q']", "params['v']")


PIECES = """HloModule m

%body (t: (f32[8,64], f32[8,64], s32[])) -> (f32[8,64], f32[8,64], s32[]) {
  %t = (f32[8,64]{1,0}, f32[8,64]{1,0}, s32[]) parameter(0)
  %w = f32[8,64]{1,0} get-tuple-element(%t), index=0
  %x = f32[8,64]{1,0} get-tuple-element(%t), index=1
  %i = s32[] get-tuple-element(%t), index=2
  %swapped = f32[8,64]{1,0} copy(%x)
  ROOT %out = (f32[8,64]{1,0}, f32[8,64]{1,0}, s32[]) tuple(%swapped, %w, %i)
}

%cond (c: (f32[8,64], f32[8,64], s32[])) -> pred[] {
  %c = (f32[8,64]{1,0}, f32[8,64]{1,0}, s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

%same (s: f32[8,64]) -> f32[8,64] {
  ROOT %s = f32[8,64]{1,0} parameter(0)
}

%turned (u: f32[8,64]) -> f32[64,8] {
  %u = f32[8,64]{1,0} parameter(0)
  ROOT %transpose = f32[64,8]{1,0} transpose(%u), dimensions={1,0}
}

ENTRY %main (w: f32[8,64], x: f32[8,64], i: s32[]) -> f32[64,8] {
  %w = f32[8,64]{1,0} parameter(0), metadata={op_name="params['w']"}
  %x = f32[8,64]{1,0} parameter(1), metadata={op_name="x"}
  %i = s32[] parameter(2), metadata={op_name="i"}
  BODY
}
"""


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        # Weights and activations change places at each turn, so after two turns either place may hold either.
        ("%t = (f32[8,64], f32[8,64], s32[]) tuple(%w, %x, %i)\n  ROOT %l = (f32[8,64], f32[8,64], s32[]) while(%t), "
         'condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"2"}}', []),
        ("%t = (f32[8,64], f32[8,64], s32[]) tuple(%w, %w, %i)\n  ROOT %l = (f32[8,64], f32[8,64], s32[]) while(%t), "
         'condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"2"}}', ["copy"]),
        ("ROOT %f = f32[64,8]{1,0} fusion(%w), kind=kLoop, calls=%turned", ["transpose"]),
        ("ROOT %f = f32[64,8]{1,0} call(%w), to_apply=%turned", ["transpose"]),
        ("ROOT %f = f32[8,64]{1,0} add(%w, %x)", []),
        ("ROOT %f = f32[4,64]{1,0} dynamic-slice(%w, %i, %i), dynamic_slice_sizes={4,64}", ["dynamic-slice"]),
        ("%b = f32[8,64]{1,0} conditional(%i, %w, %w), branch_computations={%same, %same}\n  ROOT %f = f32[8,64]{1,0} copy(%b)", ["copy"]),
        ("%b = f32[8,64]{1,0} conditional(%i, %w, %x), branch_computations={%same, %same}\n  ROOT %f = f32[8,64]{1,0} copy(%b)", []),
        ("%s = (f32[8,64]{1,0}, f32[8,64]{1,0}, u32[]) copy-start(%w)\n  ROOT %d = f32[8,64]{1,0} copy-done(%s)", ["copy"]),
        ("ROOT %g = f32[16,64]{1,0} all-gather(%w), replica_groups={{0,1}}, dimensions={0}", []),
        ("%r = f32[8,64]{1,0} rng(%i, %i), distribution=rng_uniform\n  ROOT %c = f32[8,64]{1,0} copy(%r)", []),
    ],
)  # fmt: skip
def test_values_are_followed_through_loops_calls_branches_and_tuples(body, kinds):
    assert [copy.kind for copy in find(PIECES.replace("BODY", body))] == kinds


def test_small_copies_are_left_out():
    text = PIECES.replace("BODY", "ROOT %f = f32[64,8]{1,0} transpose(%w), dimensions={1,0}")
    assert len(find(text, least_bytes=2048)) == 1
    assert find(text, least_bytes=2049) == ()
