import pytest

from llamarl_jax.aot.buffers import as_large_as, parse_temporaries
from llamarl_jax.aot.hlo import parse_program
from llamarl_jax.aot.shapes import ArrayShape, HloTextError
from tests.aot.programs import C, D, L, S, read_buffers, read_sample

LAYER = ArrayShape("f32", (S, C, D))


def test_a_cache_in_a_loop_is_written_in_place_and_one_through_a_scan_is_kept_twice():
    in_place = parse_temporaries(read_buffers("cache_in_place"), least_bytes=1)
    assert as_large_as(in_place, [LAYER]) == ()
    program = parse_program(read_sample("cache_through_scan"))
    doubled = parse_temporaries(read_buffers("cache_through_scan"), program, least_bytes=1)
    whole = ArrayShape("f32", (L, *LAYER.dims))
    found = as_large_as(doubled, [whole])
    assert {t.offset for t in found} == {0}  # two names of one place
    assert {t.num_bytes for t in found} == {whole.num_bytes}
    assert found[-1].op_name.endswith("dynamic_update_slice")
    cache = next(p for p in program.parameters if p.name == "caches")
    assert cache.aliased_output is not None  # it was donated all the same


def test_temporaries_are_listed_largest_first_and_small_ones_left_out():
    sizes = [t.num_bytes for t in parse_temporaries(read_buffers("stacked_layers"), least_bytes=8192)]
    assert sizes == [4 << 20, 512 * 512 * 2, 8 * 512 * 2]  # cuBLAS's workspace, the layer's copy, the activations
    assert [t.num_bytes for t in parse_temporaries(read_buffers("stacked_layers"))] == [4 << 20]


def test_another_text_is_an_error():
    with pytest.raises(HloTextError, match="no buffer assignment of XLA: 'HloModule"):
        parse_temporaries(read_sample("float8"))
