"""Turns the trainer's weights into the decoder's, on the trainer mesh, so that the move to the generator mesh is a plain copy.

The trainer holds float32 parameters stacked over layers and split over fsdp × tensor. The decoder wants another dtype, a list of
layers, and a split over its own tensor axis. One jitted program per bucket does all of it at once: unstack, fuse, quantise or cast, and
reshard to slices that are exactly the slices the generator's devices hold. A `jax.device_put` between arrays with equal slices goes from
device to device; between unequal ones JAX gathers through host memory without a word, which is the fault this module exists
to exclude.

Equal slices need the tensor axis T of the generator to divide the N trainer devices. Where it does not (one trainer device, two
tensor-parallel decoder devices), weights travel in e = gcd(T, N) slices and the generator mesh cuts them further on arrival; nothing
bounces then either, at the price of T/e times the bytes.

Layers are exported in buckets of about `bucket_bytes`, by one program that takes the first layer's index as a traced argument, so that
the transient memory on the trainer is one bucket and compile time does not grow with depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from llamarl_jax.meshes import Meshes, build_mesh
from llamarl_jax.models.decoding_form import fuse_layer
from llamarl_jax.models.transformer import Params, TransformerSpec, decoder_dtype
from llamarl_jax.quantization.fp8 import quantize_kernels


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """How weights travel from trainer to generator."""

    bucket_bytes: int = 1 << 30
    """Bytes exported and moved at once; bounds the extra memory on the trainer."""
    verify: Literal["first", "always", "never"] = "first"
    """When trainer and generator compare checksums of the weights: at the first update, at all of them, or never."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"weights.bucket_bytes is {self.bucket_bytes}; it must be at least 1 (usual: 1 GiB)")


class WeightExporter:
    """Exports, moves and lands weights for one pair of meshes; holds only jitted functions."""

    def __init__(self, trainer: TransformerSpec, generator: TransformerSpec, meshes: Meshes, dtype: Any, config: WeightsConfig) -> None:
        """Plans slices and buckets.

        Args:
            trainer: the stacked form.
            generator: the list form.
            dtype: type of the decoder's weights.
        """
        self._generator = generator
        self._dtype = jnp.dtype(dtype)
        num_tensor = meshes.generator.shape["tensor"]
        num_slices = math.gcd(num_tensor, meshes.trainer.size)
        self._export_mesh = build_mesh(list(meshes.trainer.devices.flat), {"data": meshes.trainer.size // num_slices, "tensor": num_slices})
        flight_mesh = _flight_mesh(meshes.generator, num_slices)
        self._export_shardings = generator.shardings(self._export_mesh)
        self._layer_on_trainer = generator.shardings(meshes.trainer)["layers"][0]
        self._flight_shardings = generator.shardings(flight_mesh)
        self._final_shardings = generator.shardings(meshes.generator)
        self._land = None
        if num_slices != num_tensor:
            self._land = jax.jit(lambda params: params, out_shardings=self._final_shardings)
        layer_bytes = tree_bytes(trainer.shapes["layers"], self._dtype) // trainer.config.num_layers
        self._layers_per_bucket = min(max(1, config.bucket_bytes // layer_bytes), trainer.config.num_layers)
        self._export_layers = {}
        for count in {self._layers_per_bucket, trainer.config.num_layers % self._layers_per_bucket} - {0}:
            shardings = [self._export_shardings["layers"][0]] * count
            self._export_layers[count] = jax.jit(partial(self._cast_layers, num_layers=count), out_shardings=shardings)
        self._export_rest = jax.jit(self._cast_rest, out_shardings={k: v for k, v in self._export_shardings.items() if k != "layers"})

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy of the decoder's weights."""
        return tree_bytes(self._generator.decoder_shapes(self._dtype))

    def buckets(self, params: Params) -> Iterator[Params]:
        """Yields the decoder's weights on the trainer mesh, a bucket at a time, each a part of the final nested dict."""
        yield self._export_rest({k: v for k, v in params.items() if k != "layers"})
        num_layers = self._generator.config.num_layers
        for first in range(0, num_layers, self._layers_per_bucket):
            count = min(self._layers_per_bucket, num_layers - first)
            layers = self._export_layers[count](params["layers"], np.int32(first))
            yield {"layers": {first + i: layer for i, layer in enumerate(layers)}}

    def transfer(self, bucket: Params) -> Params:
        """Copies one bucket to the generator's devices, slice by slice, without touching host memory."""
        return jax.device_put(bucket, _matching(bucket, self._flight_shardings))

    def land(self, params: Params) -> Params:
        """Cuts complete weights to the generator's final slices where they travelled in larger ones."""
        return params if self._land is None else self._land(params)

    def send(self, params: Params) -> Params:
        """Exports, moves and lands complete weights, without a channel."""
        whole: Params = {"layers": {}}
        for bucket in self.buckets(params):
            merge(whole, self.transfer(bucket))
        return self.land(whole)

    def _cast_layers(self, layers: Params, first: Int[Array, ""], *, num_layers: int) -> list[Params]:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, num_layers)

        part = jax.tree.map(cut, layers)
        config, quantization = self._generator.config, self._generator.quantization
        fused = [fuse_layer(jax.tree.map(lambda x, i=i: x[i], part), config) for i in range(num_layers)]
        cast = [self._cast(quantize_kernels(layer, quantization)) for layer in fused]
        # Pinned to where the masters are, or XLA moves float32 between the devices and rounds it off on arrival.
        return [jax.lax.with_sharding_constraint(layer, self._layer_on_trainer) for layer in cast]

    def _cast_rest(self, rest: Params) -> Params:
        # A copy even where the dtype is right: jit would hand out its own argument, which the next training step donates.
        return jax.tree.map(jnp.copy, self._cast(quantize_kernels(rest, self._generator.quantization)))

    def _cast(self, params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, x: x.astype(decoder_dtype(path, x, self._dtype)), params)


def checksums(params: Params) -> Params:
    """Returns a uint32 digest of every leaf, equal for equal weights however they are sharded.

    Each element's bits are multiplied by an odd number made from its index and summed modulo 2³², so that exchanged elements change the
    digest. Integer addition is associative, so any partition gives the same number.
    """

    def digest(leaf: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        return jnp.sum(bits * _odd_numbers(leaf.shape), dtype=jnp.uint32)

    return jax.tree.map(digest, params)


def tree_bytes(tree: Any, dtype: Any = None) -> int:
    """Returns the bytes of all leaves (arrays or shapes), in `dtype` if one is given."""
    return sum(math.prod(x.shape) * jnp.dtype(dtype or x.dtype).itemsize for x in jax.tree.leaves(tree))


def _odd_numbers(shape: tuple[int, ...]) -> Array:
    """Returns a different odd uint32 for (nearly) every index, built from one iota per dimension so that it shards like the array."""
    mix = jnp.uint32(0)
    for dim in range(len(shape)):
        mix = mix * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(40503 + 2 * dim)
    return (mix ^ (mix >> 15)) * jnp.uint32(2) + jnp.uint32(1)


def _flight_mesh(generator: Mesh, num_slices: int) -> Mesh:
    """Views the generator's devices as (replicas, num_slices); with num_slices = tensor this is the generator mesh itself."""
    num_data, num_tensor = generator.shape["data"], generator.shape["tensor"]
    grid = generator.devices.reshape(num_data, num_slices, num_tensor // num_slices).transpose(0, 2, 1)
    return build_mesh(list(grid.reshape(-1)), {"data": grid.size // num_slices, "tensor": num_slices})


def merge(whole: Params, part: Params) -> None:
    """Adds the leaves of a bucket to the nested dict of all weights."""
    for key, value in part.items():
        if key == "layers":
            whole["layers"].update(value)
        else:
            whole[key] = value


def _matching(part: Any, whole: Any) -> Any:
    """Returns the entries of the nested dict `whole` that `part` has."""
    return {k: _matching(v, whole[k]) for k, v in part.items()} if isinstance(part, dict) else whole
