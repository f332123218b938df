"""The trial that a kernel for GPUs must pass on a card before the decoder takes it; the kernel runs step by step on a CPU here."""

import logging
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamarl_jax.engine import kernel_choice
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.kernel_choice import choose_kernels, find_fault
from llamarl_jax.kernels import gpu
from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.attention import part_of
from llamarl_jax.models.kv_cache import CacheType
from llamarl_jax.models.presets import PRESETS
from tests.engine.tiny_engine import CONFIG

INTERPRETED = part_of("pallas_interpreted")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["same", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("model", [CONFIG, PRESETS["llama3.1-8b"]], ids=["tiny", "8B"])
def test_our_kernel_has_no_fault(dtype, cache_dtype, model):
    cache_type: CacheType = dtype if cache_dtype == "same" else cache_dtype
    assert find_fault(jax.devices("cpu")[0], model, dtype, cache_type, INTERPRETED) is None


def sees_one_too_many(queries: Any, cache: Any, lengths: Any) -> Any:
    return INTERPRETED(queries, cache, lengths + 1)


def gives_nan(queries: Any, cache: Any, lengths: Any) -> Any:
    mixed, lse = INTERPRETED(queries, cache, lengths)
    return mixed * jnp.nan, lse


def cannot_be_compiled(queries: Any, cache: Any, lengths: Any) -> Any:
    raise NotImplementedError("no such instruction\nand a long dump of it")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (sees_one_too_many, r"its result is \d\.?\d* from that of XLA"),
        (gives_nan, "its result is nan from that of XLA"),
        (cannot_be_compiled, "it fails with NotImplementedError: no such instruction"),
    ],
)
def test_a_fault_is_found_and_xla_taken(kernel, fault, monkeypatch, caplog):
    """As if the CPU were a card for which the kernel was made."""
    mesh = build_mesh(jax.devices()[:2], {"data": 2, "tensor": 1})
    monkeypatch.setattr(gpu, "find_obstacle", lambda *_: None)
    monkeypatch.setattr(kernel_choice, "_own_card", lambda mesh: mesh.devices.flat[0])
    monkeypatch.setattr(kernel_choice, "find_fault", partial(find_fault, kernel=kernel))
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(EngineConfig(), mesh, CONFIG) == "xla"
    (said,) = caplog.messages
    assert re.search(f"instead of the kernel of our own: on cpu, where it was tried with a small example, {fault}$", said)
    with pytest.raises(ValueError, match=rf"engine\.kernels is 'pallas', but on cpu, .*, {fault}; or choose 'auto'"):
        choose_kernels(EngineConfig(kernels="pallas"), mesh, CONFIG)
    monkeypatch.setattr(kernel_choice, "find_fault", lambda *_: None)
    assert choose_kernels(EngineConfig(), mesh, CONFIG) == "pallas"
