from llamarl_jax.bench.hlo_text import parse_hlo


def test_fusions_are_described_by_what_is_in_them():
    text = """
%fused (p: f32[2,3]) -> f32[2] {
  %p = f32[2,3]{1,0} parameter(0)
  %d = f32[2,4]{1,0} dot(%p, %p), metadata={op_name="jit(f)/while/body/closed_call/mlp/dot_general"}
  ROOT %r = f32[2]{0} reduce(%d), to_apply=%sum, metadata={op_name="jit(f)/max"}
}

ENTRY %main (a: f32[2,3]) -> f32[2] {
  %a = f32[2,3]{1,0} parameter(0)
  %copy.1 = f32[2,3]{1,0} copy(%a)
  ROOT %fusion.7 = f32[2]{0} fusion(%copy.1), kind=kLoop, calls=%fused
}
"""
    found = parse_hlo(text)
    assert found["fusion.7"].label == "dot + reduce f32[2,3] = f32[2] mlp/dot_general"
    assert found["copy.1"].label == "copy f32[2,3]"


def test_a_loop_over_threads_is_work_and_a_plain_call_is_none():
    text = """
%work (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %e = f32[2]{0} exponential(%p), metadata={op_name="jit(f)/exp"}
}

%plain (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%q)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %call.1 = f32[2]{0} call(%a), to_apply=%work
  ROOT %call.2 = f32[2]{0} call(%call.1), to_apply=%plain
}
"""
    found = parse_hlo(text)
    assert not found["call.1"].is_container
    assert found["call.1"].label == "exponential f32[2]"
    assert found["call.2"].is_container


def test_a_loop_over_a_long_tuple_is_a_container():
    text = """
ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %while.3 = (s32[], f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}, /*index=5*/f32[2]{0}) while(%tuple.1), condition=%c, body=%b
  ROOT %n = f32[2]{0} negate(%a)
}
"""
    assert parse_hlo(text)["while.3"].is_container


def test_a_custom_call_is_named_by_its_target_and_largest_operand():
    text = """
ENTRY %main (a: f32[2,8], b: f32[9,8]) -> f32[2,9] {
  %a = f32[2,8]{1,0} parameter(0)
  %b = f32[9,8]{1,0} parameter(1)
  ROOT %c.2 = f32[2,9]{1,0} custom-call(%a, %b), custom_call_target="llamarl_linear", metadata={op_name="jit(f)/mlp/ffi_call"}
}
"""
    assert parse_hlo(text)["c.2"].label == "llamarl_linear f32[9,8] = f32[2,9] mlp/ffi_call"
