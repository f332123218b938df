import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl  # the only place where a transfer through host memory can be seen

from llamarl_jax.meshes import Meshes, build_mesh
from llamarl_jax.models.transformer import TransformerSpec
from llamarl_jax.quantization.fp8 import QuantizationConfig, quantize
from llamarl_jax.weights.export import WeightExporter, WeightsConfig, checksums, tree_bytes
from tests.engine.tiny_engine import CONFIG, LISTED, STACKED, random_params, unstack


@pytest.fixture(scope="module")
def params():
    return jax.device_get(random_params(STACKED))


def _meshes(trainer: tuple[int, int, int], generator: tuple[int, int]) -> Meshes:
    devices = jax.devices()
    split = int(np.prod(trainer))
    return Meshes(
        build_mesh(devices[:split], dict(zip(("data", "fsdp", "tensor"), trainer, strict=True))),
        build_mesh(devices[split : split + int(np.prod(generator))], dict(zip(("data", "tensor"), generator, strict=True))),
    )


MESHES = [
    ((1, 1, 1), (1, 1)),
    ((1, 4, 1), (1, 4)),
    ((1, 4, 1), (4, 1)),
    ((2, 2, 1), (2, 2)),
    ((1, 2, 2), (1, 2)),
    ((1, 4, 1), (1, 2)),
    ((1, 1, 4), (2, 2)),
    ((1, 1, 1), (1, 2)),  # one trainer device cannot hold halves: they are cut on arrival
    ((1, 3, 1), (2, 2)),
]


@pytest.mark.parametrize(("trainer", "generator"), MESHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_leaf_arrives_exactly_in_its_sharding_without_touching_the_host(params, trainer, generator, dtype, monkeypatch):
    meshes = _meshes(trainer, generator)
    placed = jax.device_put(params, STACKED.shardings(meshes.trainer))
    exporter = WeightExporter(STACKED, LISTED, meshes, dtype, WeightsConfig(bucket_bytes=1))
    exporter.send(placed)  # compiles; constants of a compilation may pass through the host

    def bounce(array: ArrayImpl) -> None:
        raise AssertionError(f"array of shape {array.shape} was copied to the host")

    with monkeypatch.context() as patch:
        patch.setattr(ArrayImpl, "_value", property(bounce))
        arrived = jax.block_until_ready(exporter.send(placed))
    expected = _as_decoded(unstack(params), dtype)
    assert jax.tree.structure(arrived) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(arrived), expected)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding} instead of {s}"),
        arrived,
        LISTED.shardings(meshes.generator),
    )
    assert {d for x in jax.tree.leaves(arrived) for d in x.sharding.device_set} == set(meshes.generator.devices.flat)
    assert exporter.num_bytes == tree_bytes(expected)


def _as_decoded(params, dtype):
    """Norms stay float32."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key == "scale" else x.astype(jnp.dtype(dtype)), params)


@pytest.mark.parametrize(("trainer", "generator"), [((1, 1, 1), (1, 1)), ((1, 2, 2), (2, 2)), ((1, 4, 1), (1, 2))])
def test_float8_weights_are_made_on_the_trainer_mesh_from_its_masters(params, trainer, generator):
    """Half the bytes of bfloat16, the same values on every mesh, within half a step of the masters."""
    meshes = _meshes(trainer, generator)
    spec = TransformerSpec.build(CONFIG, is_scanned=False, quantization=QuantizationConfig(mode="w8a8"))
    exporter = WeightExporter(STACKED, spec, meshes, "bfloat16", WeightsConfig(bucket_bytes=1))
    arrived = exporter.send(jax.device_put(params, STACKED.shardings(meshes.trainer)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrived) == jax.tree.map(
        lambda x: (x.shape, x.dtype), spec.decoder_shapes(jnp.bfloat16)
    )
    for layer, masters in zip(arrived["layers"].values(), unstack(params)["layers"].values(), strict=True):
        for part, name in (("attention", "qkv_proj"), ("attention", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj")):
            linear, master = jax.device_get(layer[part][name]), masters[part][name]["kernel"]
            assert linear["kernel"].dtype == jnp.float8_e4m3fn
            scale = np.abs(master).max(axis=1) / 448
            np.testing.assert_allclose(linear["kernel_scale"], scale, rtol=1e-6)
            error = np.abs(linear["kernel"].astype(np.float32) * linear["kernel_scale"][:, None] - master)
            assert (error <= np.maximum(np.abs(master) / 16, scale[:, None] * 2.0**-10) * 1.001).all()  # 3 bits of mantissa, subnormals
        assert layer["attention_norm"]["scale"].dtype == jnp.float32
    half = WeightExporter(STACKED, LISTED, meshes, "bfloat16", WeightsConfig())
    assert exporter.num_bytes == tree_bytes(arrived)
    kernels = CONFIG.num_layers * (48 * 96 + 48 * 48 + 3 * 48 * 96)
    assert half.num_bytes - exporter.num_bytes == kernels - CONFIG.num_layers * 4 * (96 + 48 + 192 + 48)


@pytest.mark.parametrize(("trainer", "generator"), [((1, 1, 1), (1, 1)), ((1, 2, 2), (2, 2))])
def test_an_lm_head_of_its_own_travels_in_float8_if_the_table_says_so(trainer, generator):
    meshes, config = _meshes(trainer, generator), dataclasses.replace(CONFIG, is_tied_embedding=False)
    stacked = TransformerSpec.build(config, is_scanned=True)
    listed = TransformerSpec.build(config, is_scanned=False, quantization=QuantizationConfig(mode="w8a8", kernels=("o_proj", "lm_head")))
    params = random_params(stacked)
    exporter = WeightExporter(stacked, listed, meshes, "bfloat16", WeightsConfig())
    arrived = exporter.send(jax.device_put(params, stacked.shardings(meshes.trainer)))
    values, scale = jax.device_get(quantize(params["lm_head"]["kernel"]))
    np.testing.assert_array_equal(arrived["lm_head"]["kernel"], values)
    np.testing.assert_array_equal(arrived["lm_head"]["kernel_scale"], scale)
    assert arrived["embed"]["embedding"].dtype == jnp.bfloat16
    types = {name: linear["kernel"].dtype.name for part in ("attention", "mlp") for name, linear in arrived["layers"][1][part].items()}
    assert types == {"qkv_proj": "bfloat16", "o_proj": "float8_e4m3fn", "gate_up_proj": "bfloat16", "down_proj": "bfloat16"}


def test_the_detector_sees_a_bounce(params, monkeypatch):
    """Negative control: fsdp on one dimension to tensor on another goes through the host."""
    meshes = _meshes((1, 4, 1), (1, 4))
    kernel = jax.device_put(
        params["layers"]["mlp"]["up_proj"]["kernel"], STACKED.shardings(meshes.trainer)["layers"]["mlp"]["up_proj"]["kernel"]
    )
    seen = []
    original = ArrayImpl._value

    def note(array: ArrayImpl) -> np.ndarray:
        seen.append(array.shape)
        return original.fget(array)

    with monkeypatch.context() as patch:
        patch.setattr(ArrayImpl, "_value", property(note))
        target = STACKED.shardings(build_mesh(list(meshes.generator.devices.flat), {"data": 1, "fsdp": 1, "tensor": 4}))
        jax.block_until_ready(jax.device_put(kernel, target["layers"]["mlp"]["up_proj"]["kernel"]))
    assert seen == [kernel.shape]


def test_shared_devices_get_their_own_copy(params):
    """The trainer donates its parameters to the next step; the decoder's must survive that."""
    device = jax.devices()[:1]
    meshes = Meshes(build_mesh(device, {"data": 1, "fsdp": 1, "tensor": 1}), build_mesh(device, {"data": 1, "tensor": 1}))
    placed = jax.device_put(params, STACKED.shardings(meshes.trainer))
    arrived = WeightExporter(STACKED, LISTED, meshes, "float32", WeightsConfig()).send(placed)
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(placed))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(arrived), unstack(params))


def test_checksums_ignore_sharding_and_notice_damage(params):
    digest = jax.jit(checksums)
    meshes = _meshes((1, 2, 2), (1, 4))
    alone = jax.device_get(digest(params))
    sharded = jax.device_get(digest(jax.device_put(params, STACKED.shardings(meshes.trainer))))
    assert jax.tree.all(jax.tree.map(lambda a, b: int(a) == int(b), alone, sharded))
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    flipped = kernel.copy()
    flipped[1, 2, 3] = np.nextafter(flipped[1, 2, 3], 1)
    swapped_layers, swapped_rows, swapped_entries = kernel[::-1], kernel[:, ::-1], kernel.copy()
    swapped_entries[0, 0, [0, 1]] = swapped_entries[0, 0, [1, 0]]
    digests = {int(digest({"k": x})["k"]) for x in (kernel, flipped, swapped_layers, swapped_rows, swapped_entries)}
    assert len(digests) == 5


def test_few_programs_however_deep(params):
    exporter = WeightExporter(STACKED, LISTED, _meshes((1, 1, 1), (1, 1)), "float32", WeightsConfig(bucket_bytes=1))
    placed = jax.device_put(params, STACKED.shardings(_meshes((1, 1, 1), (1, 1)).trainer))
    assert len(list(exporter.buckets(placed))) == 1 + CONFIG.num_layers
    assert [f._cache_size() for f in exporter._export_layers.values()] == [1]


def test_bad_bucket_size():
    with pytest.raises(ValueError, match=r"weights.bucket_bytes is 0"):
        WeightsConfig(bucket_bytes=0)
