"""Trainer and generator meshes from one list of devices, and the one table from logical array axes to mesh axes.

A parameter names its dimensions once ("heads", "embed", …). `LOGICAL_TO_MESH` says which mesh axis each name is split over; the
same table serves both meshes, because an axis that a mesh does not have is simply dropped: on the generator mesh (`data` × `tensor`)
an "embed" dimension is whole, on the trainer mesh (`data` × `fsdp` × `tensor`) it is split. A dimension that does not divide
evenly stays whole, so that a model with three key-value heads runs on a tensor axis of four with its attention replicated.

Meshes are built with `Mesh(np.array(devices).reshape(…))`, not `jax.make_mesh`, which may reorder a subset of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

LOGICAL_TO_MESH: Mapping[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "qkv": ("tensor",),
    "gate_up": ("tensor",),
    "rows": ("data", "fsdp"),  # trajectories of a batch, slots of a decoder
}
"""Logical axis → mesh axes. Names that are missing here ("layers", "length", "head_dim", "norm") are never split."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which devices train and which generate."""

    kind: Literal["disjoint", "shared"] = "disjoint"
    """`disjoint`: two device subsets run at the same time; `shared`: both roles on the same devices (one GPU, co-located baseline)."""
    trainer_data: int = 1
    """Data-parallel replicas of the trainer."""
    trainer_fsdp: int = 1
    """Devices over which parameters, gradients and optimizer state are split."""
    trainer_tensor: int = 1
    """Tensor-parallel devices of the trainer."""
    generator_data: int = 1
    """Independent decoder replicas (slots are split over them)."""
    generator_tensor: int = 1
    """Tensor-parallel devices of the decoder."""
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Backend; `auto` takes a GPU where JAX finds one."""

    def __post_init__(self) -> None:
        for name in ("trainer_data", "trainer_fsdp", "trainer_tensor", "generator_data", "generator_tensor"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"placement.{name} is {value}; a mesh axis needs at least 1 device")
        if self.kind == "shared" and self.num_trainer_devices != self.num_generator_devices:
            raise ValueError(
                f"placement 'shared' puts both roles on the same devices, but the trainer mesh has {self.num_trainer_devices} and the "
                f"generator mesh {self.num_generator_devices}; make the products equal or choose 'disjoint'"
            )

    @property
    def num_trainer_devices(self) -> int:
        """Devices of the trainer mesh."""
        return self.trainer_data * self.trainer_fsdp * self.trainer_tensor

    @property
    def num_generator_devices(self) -> int:
        """Devices of the generator mesh."""
        return self.generator_data * self.generator_tensor

    @property
    def num_devices(self) -> int:
        """Devices that a run needs in all."""
        return self.num_trainer_devices + (self.num_generator_devices if self.kind == "disjoint" else 0)


@dataclass(frozen=True)
class Meshes:
    """The two meshes of a run; with placement `shared` they cover the same devices."""

    trainer: Mesh
    generator: Mesh


def configure_platform(placement: PlacementConfig) -> None:
    """Chooses the backend and, on CPU, makes as many virtual devices as the placement needs.

    Must run before JAX initialises its backends. It leaves an XLA_FLAGS device count of the user's in force.
    """
    if placement.platform != "auto":
        jax.config.update("jax_platforms", "cpu" if placement.platform == "cpu" else "cuda")
    num_cpu_devices: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if not _backends_are_initialised() and num_cpu_devices < placement.num_devices and not _flag_sets_device_count():
        jax.config.update("jax_num_cpu_devices", placement.num_devices)


def build_meshes(placement: PlacementConfig, devices: Sequence[Any] | None = None) -> Meshes:
    """Builds both meshes from the first devices of the list: trainer devices first, generator devices after them.

    Raises:
        ValueError: there are fewer devices than the placement needs.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < placement.num_devices:
        raise ValueError(
            f"placement '{placement.kind}' needs {placement.num_devices} devices (trainer {placement.num_trainer_devices}, generator "
            f"{placement.num_generator_devices}) but there are {len(devices)} ({devices[0].platform if devices else 'none'}); choose "
            "smaller mesh axes, placement.kind 'shared', or on CPU set placement.platform to 'cpu', which makes virtual devices"
        )
    split = placement.num_trainer_devices
    generator_devices = devices[:split] if placement.kind == "shared" else devices[split : split + placement.num_generator_devices]
    trainer_shape = {"data": placement.trainer_data, "fsdp": placement.trainer_fsdp, "tensor": placement.trainer_tensor}
    generator_shape = {"data": placement.generator_data, "tensor": placement.generator_tensor}
    return Meshes(build_mesh(devices[:split], trainer_shape), build_mesh(generator_devices, generator_shape))


def build_mesh(devices: Sequence[Any], shape: Mapping[str, int]) -> Mesh:
    """Builds one mesh with Auto axes in the given device order."""
    grid = np.array(devices).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def partition_spec(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], units: Mapping[str, int]) -> PartitionSpec:
    """Resolves logical axes of one array to a PartitionSpec on `mesh`.

    Args:
        axes: logical name of each dimension, or None.
        shape: size of each dimension.
        units: smallest piece of a logical axis that may not be cut (head_dim for "heads").
    """
    entries: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        wanted = tuple(a for a in LOGICAL_TO_MESH.get(axis or "", ()) if mesh.shape.get(a, 1) > 1)
        parts = math.prod(mesh.shape[a] for a in wanted)
        entries.append(wanted if wanted and size % (parts * units.get(axis or "", 1)) == 0 else None)
    return PartitionSpec(*entries)


def named_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], units: Mapping[str, int] | None = None) -> NamedSharding:
    """Returns the sharding of an array whose dimensions carry the logical names `axes`."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape, units or {}))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps an array whole on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation inside jit to its logical axes on the mesh of `jax.set_mesh`; does nothing where none is set.

    Without it the partitioner may prefer to all-reduce activations to gathering FSDP weights.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(mesh, axes, x.shape, {}))  # pyright: ignore[reportArgumentType]


def num_row_shards() -> int:
    """Returns over how many devices the rows of an activation are split on the mesh of `jax.set_mesh`; 1 where none is set."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in LOGICAL_TO_MESH["rows"])


def _backends_are_initialised() -> bool:
    from jax.extend import backend

    return bool(getattr(backend, "backends_are_initialized", lambda: False)())


def _flag_sets_device_count() -> bool:
    import os

    return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
