import importlib.metadata
from typing import Any

import pytest
from jax.experimental import topologies

from llamarl_jax.aot import targets
from llamarl_jax.aot.targets import A100, H100, H200, AotUnavailableError, find_obstacle, topology


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    real = importlib.metadata.version
    known = {"jax_cuda12_plugin": None, "jax_cuda13_plugin": None, **versions}

    def version(package: str) -> str:
        name = package.replace("-", "_")
        if name not in known:
            return real(package)
        if (found := known[name]) is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(targets.importlib.metadata, "version", version)


def test_a_description_is_what_xla_reads():
    for target, feature in ((H100, "ACCELERATED_FEATURES"), (A100, "NONE")):
        major, minor = target.compute_capability
        assert f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}" in target.description
        assert f"device_memory_size: {target.memory_bytes}\n" in target.description
        assert target.description.count("{") == target.description.count("}")
    assert H200.memory_bytes > 1.7 * H100.memory_bytes


def test_each_obstacle_says_what_to_do(monkeypatch):
    pretend(monkeypatch)
    wanted = importlib.metadata.version("jaxlib")
    assert f"run `pip install --no-deps jax-cuda12-plugin=={wanted}" in (find_obstacle() or "")
    pretend(monkeypatch, jax_cuda13_plugin="0.1")
    assert f"must have the version of jaxlib, which is {wanted}, but there is jax-cuda13-plugin 0.1" in (find_obstacle() or "")

    def refuse(**_: Any) -> None:
        raise NotImplementedError("no such platform")

    pretend(monkeypatch, jax_cuda12_plugin=wanted)
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    assert "does not load with JAX_PLATFORMS='cpu' (no such platform)" in (find_obstacle() or "")
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: None)
    assert find_obstacle() is None


def test_without_the_plugin_there_is_no_topology(monkeypatch):
    pretend(monkeypatch)
    with pytest.raises(AotUnavailableError, match="needs JAX's CUDA plugin, which is not installed"):
        topology(H100)


def test_a_topology_has_at_least_one_of_each():
    with pytest.raises(ValueError, match="a topology of 1 slices × 0 hosts × 8 GPUs; each must be at least 1"):
        topology(H100, hosts=0)


@pytest.mark.aot
@pytest.mark.usefixtures("gpu_compiler")
def test_devices_come_in_the_order_slice_host_gpu():
    devices = topology(H100, slices=2, hosts=2, gpus_per_host=4)
    assert len(devices) == 16
    assert [d.id for d in devices] == list(range(16))
    assert {d.platform for d in devices} <= {"gpu", "cuda"}
