from typing import Any

import jax
import pytest

from llamarl_jax.channels import Channel
from llamarl_jax.meshes import Meshes, build_mesh
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.weights.channel import WeightChannel, WeightMismatchError
from llamarl_jax.weights.export import WeightExporter, WeightsConfig
from tests.engine.tiny_engine import LISTED, STACKED, random_params


def _channel(*, verify: Any = "first", keeps_only_newest=False, timeline=None):
    devices = jax.devices()
    meshes = Meshes(build_mesh(devices[:2], {"data": 1, "fsdp": 2, "tensor": 1}), build_mesh(devices[2:4], {"data": 1, "tensor": 2}))
    config = WeightsConfig(verify=verify)
    exporter = WeightExporter(STACKED, LISTED, meshes, "float32", config)
    channel = WeightChannel(exporter, Channel("weights", 3), config, timeline or Timeline(), keeps_only_newest=keeps_only_newest)
    params = jax.device_put(jax.device_get(random_params(STACKED)), STACKED.shardings(meshes.trainer))
    return channel, params


def test_boundary_mode_keeps_every_version_in_order():
    channel, params = _channel()
    stats = [channel.publish(version, params) for version in (0, 1, 2)]
    assert [s.is_verified for s in stats] == [True, False, False]
    assert all(s.num_bytes == stats[0].num_bytes > 0 and s.export_s > 0 and s.transfer_s > 0 for s in stats)
    updates = [channel.take() for _ in range(3)]
    assert [update and update.version for update in updates] == [0, 1, 2]
    assert channel.take(timeout_s=0.01) is None


def test_in_flight_mode_keeps_the_newest_only():
    channel, params = _channel(keeps_only_newest=True)
    for version in range(5):
        channel.publish(version, params)
    newest = channel.take_newest()
    assert newest is not None
    assert newest.version == 4
    assert channel.take_newest() is None


def test_time_of_each_phase_is_on_the_timeline():
    timeline = Timeline()
    channel, params = _channel(timeline=timeline)
    channel.publish(0, params)
    assert {(span.executor, span.kind) for span in timeline.spans()} == {("weights", "export"), ("weights", "transfer")}


@pytest.mark.parametrize("layer", [0, 1])
def test_damaged_weights_are_refused_by_name(monkeypatch, layer):
    channel, params = _channel(verify="always")
    original = WeightExporter.transfer

    def damage(self, bucket):
        moved = original(self, bucket)
        if layer in moved.get("layers", {}):
            kernel = moved["layers"][layer]["mlp"]["down_proj"]["kernel"]
            moved["layers"][layer]["mlp"]["down_proj"]["kernel"] = kernel.at[0, 0].add(1.0)
        return moved

    channel.publish(0, params)
    assert channel.take() is not None
    monkeypatch.setattr(WeightExporter, "transfer", damage)
    channel.publish(1, params)
    with pytest.raises(WeightMismatchError, match=rf"weights of version 1 arrived damaged: .*{layer}.*down_proj"):
        channel.take()
