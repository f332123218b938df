"""NVIDIA GPUs as compile-only targets: XLA compiles for them on a machine that has none.

The compiler needs JAX's CUDA plugin (the extra `aot`: two wheels, 190 MB to download, 480 MB on disk, none of NVIDIA's own libraries) and
a description of the card. Without a card nothing can be autotuned, so Triton's matrix products are off and cuBLAS is chosen; that, and that
nothing can run, are the differences from a compilation on the card.

Numbers are properties of the cards as the CUDA driver reports them; XLA keeps such a list too (github.com/openxla/xla, folder
xla/backends/gpu/target_config/specs).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
"""Either of them will do."""


class AotUnavailableError(RuntimeError):
    """This environment cannot compile for GPUs; the message says what to install or set."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A graphics card, as far as XLA's code generation asks.

    Attributes:
        memory_bytes: what the driver reports as the whole memory.
        memory_bytes_per_s: bandwidth of the memory.
        has_accelerated_features: compile for the architecture's own features (sm_90a), as on a real card.
    """

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_bytes_per_s: int
    num_cores: int
    fp32_units_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    has_accelerated_features: bool

    @property
    def description(self) -> str:
        """The card as text of XLA's GpuTargetConfigProto."""
        major, minor = self.compute_capability
        feature = "ACCELERATED_FEATURES" if self.has_accelerated_features else "NONE"
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_core": self.shared_bytes_per_core,
            "shared_memory_per_block_optin": self.shared_bytes_per_block,
            "threads_per_core_limit": 2048,
            "core_count": self.num_cores,
            "fpus_per_core": self.fp32_units_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": self.memory_bytes_per_s,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "cuda_compute_capability": f"{{ major: {major} minor: {minor} feature_extension: {feature} }}",
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        fields = "\n".join(f"  {name} {value}" if str(value).startswith("{") else f"  {name}: {value}" for name, value in device.items())
        versions = "dnn_version_info { major: 9 minor: 10 patch: 0 }\nruntime_version { major: 12 minor: 9 patch: 1 }"
        return f'gpu_device_info {{\n{fields}\n}}\nplatform_name: "CUDA"\n{versions}\ndevice_description_str: "{self.name}"\n'


def _hopper(name: str, memory_bytes: int, memory_bytes_per_s: int) -> Target:
    return Target(
        name=name,
        compute_capability=(9, 0),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        num_cores=132,
        fp32_units_per_core=128,
        clock_ghz=1.98,
        l2_bytes=50 << 20,
        shared_bytes_per_core=228 << 10,
        shared_bytes_per_block=227 << 10,
        has_accelerated_features=True,
    )


H100 = _hopper("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000)
H200 = _hopper("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000)
A100 = Target(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    memory_bytes=85_100_068_864,
    memory_bytes_per_s=2_039_040_000_000,
    num_cores=108,
    fp32_units_per_core=64,
    clock_ghz=1.41,
    l2_bytes=40 << 20,
    shared_bytes_per_core=164 << 10,
    shared_bytes_per_block=163 << 10,
    has_accelerated_features=False,
)
"""It has no float8 arithmetic: what is compiled for it shows that a check for float8 products can fail."""


def find_obstacle() -> str | None:
    """Returns why this environment cannot compile for GPUs and what to do, or None if it can."""
    wanted = importlib.metadata.version("jaxlib")
    versions = {name: version for name in PLUGINS if (version := _version(name)) is not None}
    install = f"pip install --no-deps jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted}"
    if not versions:
        return (
            f"compiling for NVIDIA GPUs needs JAX's CUDA plugin, which is not installed (the extra 'aot', 190 MB): run `{install}` or "
            "`pip install 'llamarl_jax[aot]'`"
        )
    if wanted not in versions.values():
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        return f"the CUDA plugin must have the version of jaxlib, which is {wanted}, but there is {found}: run `{install}`"
    try:
        topologies.get_topology_desc(platform="cuda", target_config=H100.description, topology="1x1x1")
    except (NotImplementedError, RuntimeError) as error:
        platforms = str(jax.config.jax_platforms or "")  # pyright: ignore[reportAttributeAccessIssue]
        return (
            f"JAX's CUDA plugin does not load with JAX_PLATFORMS={platforms!r} ({error}); where there is no GPU, set JAX_PLATFORMS=cpu "
            "before the process starts"
        )
    return None


def topology(target: Target, *, slices: int = 1, hosts: int = 1, gpus_per_host: int = 8) -> tuple[Any, ...]:
    """Returns compile-only devices for `llamarl_jax.meshes.build_mesh`, in the order slice, host, GPU.

    Args:
        slices: groups of hosts joined by a network of their own.
        hosts: of one slice.

    Raises:
        AotUnavailableError: the CUDA plugin is missing, or cannot be loaded.
        ValueError: a count is below 1.
    """
    if min(slices, hosts, gpus_per_host) < 1:
        raise ValueError(f"a topology of {slices} slices × {hosts} hosts × {gpus_per_host} GPUs; each must be at least 1")
    if obstacle := find_obstacle():
        raise AotUnavailableError(obstacle)
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target.description, topology=f"{slices}x{hosts}x{gpus_per_host}"
    )
    return tuple(described.devices)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
