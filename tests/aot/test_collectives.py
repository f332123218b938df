import jax
import pytest

from llamarl_jax.aot.collectives import Collective, axes_of, find_collectives, parse_groups
from llamarl_jax.aot.hlo import parse_program
from llamarl_jax.aot.shapes import HloTextError
from tests.aot.programs import PROGRAMS, compile_program, read_sample

MESH = {"data": 2, "tensor": 4}


def find(name: str, text: str | None = None) -> list[Collective]:
    program = parse_program(read_sample(name) if text is None else text)
    return sorted(find_collectives(program, PROGRAMS[name].mesh_shape), key=lambda c: c.kind)


@pytest.mark.parametrize(
    ("attributes", "groups", "axes"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", [(0, 4), (1, 5), (2, 6), (3, 7)], ("data",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x=1", [(0, 4), (1, 5), (2, 6), (3, 7)], ("data",)),
        ("replica_groups=[2,4]<=[8], x=1", [(0, 1, 2, 3), (4, 5, 6, 7)], ("tensor",)),
        ("replica_groups={}, x=1", [tuple(range(8))], ("data", "tensor")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [(0, 4), (1, 5), (2, 6), (3, 7)], ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)], ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", [(0, 1, 2, 3), (4, 5, 6, 7)], ("tensor",)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [(0, 4), (1, 5), (2, 6), (3, 7)], ("data",)),
        ("source_target_pairs={{0,1},{1,0}}", [(0, 1), (1, 0)], ("tensor",)),
        ("replica_groups={{0},{1}}", [(0,), (1,)], ()),
    ],
)
def test_all_notations_of_devices_lead_to_the_same_groups_and_axes(attributes, groups, axes):
    assert parse_groups(attributes, 8) == groups
    assert axes_of(groups, MESH) == axes


def test_an_unknown_notation_and_a_wrong_mesh_are_errors():
    with pytest.raises(HloTextError, match="cannot read the devices of a collective in 'replica_groups=everyone"):
        parse_groups("replica_groups=everyone", 8)
    with pytest.raises(HloTextError, match=r"device 7 of a collective is not in the mesh {'data': 2, 'tensor': 2}; give the program's own"):
        axes_of([(0, 7)], {"data": 2, "tensor": 2})


@pytest.mark.parametrize("device", ["gpu sample", "cpu"])
def test_each_kind_is_found_with_its_axes_and_bytes(device):
    """A device holds x as f32[8, 32], 1024 bytes: of data 2 × fsdp 2 × tensor 2 only fsdp splits its rows."""
    text = compile_program("every_collective", jax.devices()).text if device == "cpu" else None
    found = {c.kind: (c.axes, c.group_size, c.num_bytes, c.wire_bytes, c.executions) for c in find("every_collective", text)}
    assert found == {
        "all-reduce": (("data", "tensor"), 4, 1024, 1024 * 2 * 3 / 4, 1),
        "reduce-scatter": (("data",), 2, 1024, 512, 1),
        "all-gather": (("tensor",), 2, 2048, 1024, 1),
        "collective-permute": (("data",), 2, 1024, 1024, 1),
        "all-to-all": (("fsdp",), 2, 1024, 512, 1),
    }


@pytest.mark.parametrize("device", ["gpu sample", "cpu"])
def test_a_collective_in_a_loop_runs_at_every_turn(device):
    """Row-parallel product of [8 / data 2, 64] in float32, three turns."""
    text = compile_program("tensor_parallel_loop", jax.devices()).text if device == "cpu" else None
    (found,) = find("tensor_parallel_loop", text)
    assert (found.kind, found.axes_label, found.num_bytes, found.executions) == ("all-reduce", "tensor", 4 * 64 * 4, 3)
    assert found.dtypes == ("f32",)
    assert found.is_async == (device != "cpu")


def test_an_unfortunate_sharding_gathers_the_gradient_of_an_embedding_over_everything():
    found = find("embedding_sharded_across")
    gathers = {c.axes: c.num_bytes for c in found if c.kind == "all-gather" and "f32" in c.dtypes}
    assert gathers[("data", "fsdp")] == 16 * 8 * 64 * 4  # all rows of all devices
    assert sum(c.kind == "all-gather" for c in found) == 4


def test_a_group_that_is_a_part_of_an_axis_says_so():
    text = """HloModule m

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%sum
}
"""
    (found,) = find_collectives(parse_program(text), MESH)
    assert (found.is_partial, found.axes_label, found.is_async) == (True, "tensor (2 of them)", False)
