import pytest

from llamarl_jax.aot.shapes import ArrayShape, HloTextError, bits, leaves, num_bytes, parse_shape, split_top_level


@pytest.mark.parametrize(
    ("text", "dtype", "dims", "size"),
    [
        ("bf16[64,4096]{1,0}", "bf16", (64, 4096), 64 * 4096 * 2),
        ("f8e4m3fn[3,5]", "f8e4m3fn", (3, 5), 15),
        ("s4[3]{0:E(4)}", "s4", (3,), 2),
        ("pred[]", "pred", (), 1),
        ("f32[<=8,2]{1,0}", "f32", (8, 2), 64),
        ("c64[2]", "c64", (2,), 16),
        ("token[]", "token", (), 0),
    ],
)
def test_an_array_has_type_dimensions_and_bytes(text, dtype, dims, size):
    shape = parse_shape(text)
    assert shape == ArrayShape(dtype, dims)
    assert num_bytes(shape) == size


def test_the_memory_space_stands_in_the_layout():
    shape = parse_shape("f32[8]{0:T(128)S(5)}")
    assert isinstance(shape, ArrayShape)
    assert (shape.memory_space, str(shape)) == (5, "f32[8]")


def test_a_tuple_is_read_to_its_leaves():
    shape = parse_shape("(f32[2]{0}, (s32[], bf16[4,2]{1,0}), ())")
    assert [str(leaf) for leaf in leaves(shape)] == ["f32[2]", "s32[]", "bf16[4,2]"]
    assert num_bytes(shape) == 8 + 4 + 16


def test_commas_in_brackets_do_not_split():
    assert split_top_level("f32[2,3]{1,0}, (a, b), ") == ["f32[2,3]{1,0}", " (a, b)"]


def test_what_is_no_shape_is_an_error_that_quotes_it():
    with pytest.raises(HloTextError, match=r"'f32\[2' is not an HLO shape"):
        parse_shape("f32[2")
    with pytest.raises(HloTextError, match=r"'quaternion' is not an HLO element type.*BITS"):
        bits("quaternion")
