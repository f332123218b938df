import jax
import pytest
from jax.sharding import PartitionSpec as P

from llamarl_jax.meshes import PlacementConfig, build_mesh, build_meshes, named_sharding, num_row_shards


def test_disjoint_meshes_share_no_device_and_keep_the_order():
    meshes = build_meshes(PlacementConfig(trainer_data=2, trainer_fsdp=2, generator_data=2, generator_tensor=2))
    assert list(meshes.trainer.devices.flat) == jax.devices()[:4]
    assert list(meshes.generator.devices.flat) == jax.devices()[4:8]
    assert meshes.trainer.shape == {"data": 2, "fsdp": 2, "tensor": 1}
    assert meshes.generator.shape == {"data": 2, "tensor": 2}


def test_shared_meshes_cover_the_same_devices():
    meshes = build_meshes(PlacementConfig(kind="shared", trainer_fsdp=4, generator_data=2, generator_tensor=2))
    assert set(meshes.trainer.devices.flat) == set(meshes.generator.devices.flat) == set(jax.devices()[:4])


def test_dimensions_that_do_not_divide_and_axes_that_are_missing_stay_whole():
    mesh = build_mesh(jax.devices()[:8], {"data": 1, "fsdp": 2, "tensor": 4})
    assert named_sharding(mesh, ("heads", "embed"), (48, 64), {"heads": 12}).spec == P(("tensor",), ("fsdp",))
    assert named_sharding(mesh, ("kv_heads", "embed"), (24, 63), {"kv_heads": 12}).spec == P(None, None)
    generator = build_mesh(jax.devices()[:4], {"data": 1, "tensor": 4})
    assert named_sharding(generator, ("heads", "embed"), (48, 64), {"heads": 12}).spec == P(("tensor",), None)


def test_errors_name_the_numbers_and_a_fix():
    with pytest.raises(ValueError, match="needs 16 devices"):
        build_meshes(PlacementConfig(trainer_fsdp=8, generator_data=8))
    with pytest.raises(ValueError, match=r"placement.trainer_fsdp is 0"):
        PlacementConfig(trainer_fsdp=0)
    with pytest.raises(ValueError, match="same devices, but the trainer mesh has 2"):
        PlacementConfig(kind="shared", trainer_fsdp=2)


def test_rows_are_split_over_data_and_fsdp_of_the_mesh_in_force():
    assert num_row_shards() == 1
    with jax.set_mesh(build_mesh(jax.devices(), {"data": 2, "fsdp": 2, "tensor": 2})):
        assert num_row_shards() == 4
    with jax.set_mesh(build_mesh(jax.devices()[:4], {"data": 2, "tensor": 2})):
        assert num_row_shards() == 2
