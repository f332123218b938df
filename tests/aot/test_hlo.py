import pytest

from llamarl_jax.aot.hlo import called_computations, parse_instruction, parse_program, result_shape
from llamarl_jax.aot.shapes import HloTextError
from tests.aot.programs import read_sample

NESTED = """HloModule jit_f, input_output_alias={ {0}: (1, {}, may-alias), {1, 2}: (0, {}, must-alias) }, entry_computation_layout={()->()}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

%outer (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %w = f32[4]{0} while(%q), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%cond (c: f32[4]) -> pred[] {
  %c = f32[4]{0} parameter(0)
  ROOT %t = pred[] constant(true)
}

%other (o: f32[4]) -> f32[4] {
  ROOT %o = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4], y: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="params[\\'a\\']"}
  %y = f32[4]{0} parameter(1)
  %i = s32[] parameter(2)
  %loop = f32[4]{0} while(%x), condition=%cond, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %endless = f32[4]{0} while(%loop), condition=%cond, body=%other
  %branch = f32[4]{0} conditional(%i, %y, %endless), branch_computations={%inner, %other}
  %r = f32[] reduce(%branch, %x), dimensions={0}, to_apply=%sum
  ROOT %call = f32[4]{0} call(%branch), to_apply=%inner
}
"""


def test_executions_multiply_through_nested_loops_branches_and_calls():
    program = parse_program(NESTED)
    # 3 · 5 turns of the nested loops, once as a branch, once called.
    assert program.executions("inner") == 15 + 1 + 1
    assert program.executions("outer") == 3
    assert program.executions("sum") == 0
    assert program.unknown_trip_counts == ("endless",)
    assert {i.name: times for c, i, times in program.executed() if c.name == "outer"} == {"q": 3, "w": 3}


def test_arguments_have_names_and_the_outputs_that_take_their_memory():
    first, second, third = parse_program(NESTED).parameters
    assert (first.name, first.aliased_output, first.num_bytes) == ("params['a']", (1, 2), 16)
    assert (second.name, second.aliased_output) == ("y", (0,))
    assert (third.name, third.aliased_output) == ("i", None)


def test_an_instruction_has_a_shape_operands_and_attributes():
    line = '  ROOT %f.1 = (f32[2]{0}, /*index=1*/s32[]) fusion(%a, %b.2), kind=kLoop, calls=%g, metadata={op_name="jit(f)/\\"x\\""}'
    instruction = parse_instruction(line)
    assert (instruction.name, instruction.opcode, instruction.is_root) == ("f.1", "fusion", True)
    assert instruction.operands == ("a", "b.2")
    assert instruction.num_bytes == 12
    assert instruction.op_name == 'jit(f)/"x"'
    assert called_computations(instruction) == ("g",)
    assert instruction.target == ""
    call = parse_instruction('%c = f32[] custom-call(%a), custom_call_target="__cublas$gemm"')
    assert (call.target, call.op_name, call.trip_count) == ("__cublas$gemm", "", None)


def test_an_asynchronous_start_has_the_shape_of_its_done():
    program = parse_program(read_sample("every_collective"))
    start = program.entry.instructions["all-gather-start"]
    assert str(result_shape(program.entry, start)) == "f32[16,32]"
    assert str(result_shape(program.entry, program.entry.root)) == str(program.entry.root.shape)


def test_what_cannot_be_read_is_an_error_that_quotes_it():
    with pytest.raises(HloTextError, match="no ENTRY computation"):
        parse_program("HloModule empty\n")
    with pytest.raises(HloTextError, match="cannot read the HLO instruction 'nonsense'"):
        parse_instruction("  nonsense")
    with pytest.raises(HloTextError, match=r"a bracket is not closed in the HLO text '\(%a, %b'"):
        parse_instruction("%c = f32[] add(%a, %b")
