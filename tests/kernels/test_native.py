"""The kernels of `cpu.cc` against XLA's operations, and what happens where they cannot be compiled."""

import logging
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.kernel_choice import choose_kernels
from llamarl_jax.kernels import native
from llamarl_jax.kernels.native import NativeKernelError
from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.attention import attend_prompt_and_own
from llamarl_jax.models.kv_cache import LayerCache, write
from llamarl_jax.models.prompt_index import PromptIndex, index_prompts
from tests.engine.tiny_engine import CONFIG

HAS_KERNELS = native.find_obstacle() is None
needs_compiler = pytest.mark.skipif(not HAS_KERNELS, reason=f"no native kernels here: {native.find_obstacle()}")
ONE_DEVICE = build_mesh(jax.devices()[:1], {"data": 1, "tensor": 1})


@pytest.fixture(scope="module")
def random() -> np.random.Generator:
    return np.random.default_rng(5)


def normal(random: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape, np.float32))


@needs_compiler
class TestLinear:
    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 23, 24, 33, 63, 64, 130])
    @pytest.mark.parametrize("outputs", [1, 5, 6, 47, 48, 49, 200])
    def test_equals_a_float64_product(self, random, rows, outputs):
        """As close as float32 sums of 96 products can be."""
        x, kernel = normal(random, rows, 96), normal(random, outputs, 96)
        wide = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
        exact, size = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
        assert np.max(np.abs(np.asarray(jax.jit(native.linear)(x, kernel)) - exact) / size) < 96 * 2**-24

    @pytest.mark.parametrize("rows", [2, 5, 7, 8, 9, 16, 24, 33, 64, 100])
    def test_a_row_does_not_depend_on_its_neighbours(self, random, rows):
        """Bit for bit: a completion must be the same in whichever slot it is decoded, and whatever beside it. 1,600 inputs: 3 blocks."""
        x, kernel = normal(random, rows, 1600), normal(random, 100, 1600)
        linear = jax.jit(native.linear)
        together = np.asarray(linear(x, kernel))
        for shift in (1, rows // 2, rows - 1):
            moved = np.asarray(linear(jnp.roll(x, shift, axis=0).at[0].set(jnp.nan), kernel))
            np.testing.assert_array_equal(moved[1:], np.roll(together, shift, axis=0)[1:])

    def test_nor_on_their_number_but_for_one(self, random):
        x, kernel = normal(random, 200, 1600), normal(random, 100, 1600)
        largest = np.asarray(jax.jit(native.linear)(x, kernel))
        for rows in (2, 3, 5, 8, 9, 16, 17, 24, 33, 48, 64, 65, 100):
            np.testing.assert_array_equal(jax.jit(native.linear)(x[:rows], kernel), largest[:rows])

    def test_keeps_leading_dimensions(self, random):
        x, kernel = normal(random, 2, 3, 32), normal(random, 7, 32)
        np.testing.assert_allclose(native.linear(x, kernel), x @ kernel.T, rtol=1e-5, atol=1e-5)

    def test_nothing_behind_the_result_is_written(self, random):
        """Many results at once, of sizes that are no whole tiles: one written past its end would change another."""
        kernels = [normal(random, outputs, 64) for outputs in range(1, 40)]
        x = normal(random, 3, 64)
        together = jax.jit(lambda x, kernels: [native.linear(x, kernel) for kernel in kernels])(x, kernels)
        for result, kernel in zip(together, kernels, strict=True):
            np.testing.assert_allclose(result, x @ kernel.T, rtol=1e-4, atol=1e-4)

    def test_infinities_and_nan_stay_in_their_row(self, random):
        x, kernel = normal(random, 4, 64), normal(random, 10, 64)
        result = np.asarray(native.linear(x.at[1, 3].set(np.inf).at[2, 5].set(np.nan), kernel))
        assert np.isfinite(result[[0, 3]]).all()
        assert np.isinf(result[1]).all()
        assert np.isnan(result[2]).all()

    def test_says_what_it_takes(self):
        kernel = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        taken = {rows: native.can_multiply(jax.ShapeDtypeStruct((rows, 64), jnp.float32), kernel) for rows in (0, 1, 64, 5000)}
        assert taken == {0: False, 1: True, 64: True, 5000: True}
        assert not native.can_multiply(jax.ShapeDtypeStruct((1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, 64), jnp.bfloat16))
        assert not native.can_multiply(jax.ShapeDtypeStruct((1, 65), jnp.float32), jax.ShapeDtypeStruct((8, 65), jnp.float32))

    def test_sizes_that_are_no_whole_vectors_are_refused(self):
        with pytest.raises(jax.errors.JaxRuntimeError, match="not whole vectors"):
            jax.block_until_ready(native.linear(jnp.ones((1, 65)), jnp.ones((8, 65))))


@needs_compiler
class TestSwiglu:
    @pytest.mark.parametrize(("size", "block"), [(48, 1), (48, 2), (64, 4), (1536, 8), (64, 16), (14336, 32), (384, 128)])
    @pytest.mark.parametrize("rows", [1, 3, 70])
    def test_equals_one_in_float64(self, random, rows, size, block):
        pairs = normal(random, rows, 2 * size) * 8
        gate, up = np.moveaxis(np.asarray(pairs, np.float64).reshape(rows, -1, 2, block), 2, 0)
        expected = (gate / (1 + np.exp(-gate)) * up).reshape(rows, size)
        np.testing.assert_allclose(native.swiglu(pairs, block), expected, rtol=4e-7, atol=1e-35)

    def test_numbers_of_any_size(self):
        gate = jnp.array([0.0, -0.0, 1e-38, -1e-38, 80.0, -80.0, 200.0, -200.0, 3e38, -3e38, np.inf, np.nan, 1.0, 2.0, 3.0, 4.0])
        got = native.swiglu(jnp.concatenate([gate, jnp.ones(16)])[None], 16)[0]
        np.testing.assert_allclose(got, jax.nn.silu(gate), rtol=1e-6, atol=2e-36)

    def test_says_what_it_takes(self):
        pairs = jax.ShapeDtypeStruct((3, 192), jnp.float32)
        taken = {block: native.can_gate(pairs, block) for block in (1, 2, 3, 4, 16, 24, 32)}
        assert taken == {1: True, 2: True, 3: False, 4: True, 16: True, 24: native.num_lanes() < 16, 32: True}
        assert not native.can_gate(jax.ShapeDtypeStruct((3, 198), jnp.float32), 1)
        assert not native.can_gate(pairs, 64)
        assert not native.can_gate(jax.ShapeDtypeStruct((0, 192), jnp.float32), 2)
        assert not native.can_gate(jax.ShapeDtypeStruct((3, 192), jnp.bfloat16), 2)

    @pytest.mark.parametrize("block", [0, 3, 5, 64])
    def test_other_blocks_are_refused(self, block):
        with pytest.raises(jax.errors.JaxRuntimeError, match="not whole vectors or whole parts of one"):
            jax.block_until_ready(native.swiglu(jnp.ones((2, 192)), block))


@needs_compiler
class TestRmsNorm:
    @pytest.mark.parametrize("shape", [(1, 16), (3, 576), (70, 4096), (2, 5, 7, 64)])
    @pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
    def test_equals_one_in_float64(self, random, shape, size):
        x, scale = normal(random, *shape) * np.float32(size), normal(random, shape[-1])
        wide = np.asarray(x, np.float64)
        expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
        np.testing.assert_allclose(native.rms_norm(x, scale, 1e-5), expected, rtol=2e-6)

    def test_says_what_it_takes(self):
        taken = {size: native.can_normalise(jax.ShapeDtypeStruct((3, size), jnp.float32)) for size in (0, 16, 17, 64)}
        assert taken == {0: False, 16: True, 17: False, 64: True}
        assert not native.can_normalise(jax.ShapeDtypeStruct((3, 64), jnp.bfloat16))

    def test_rows_that_are_no_whole_vectors_are_refused(self):
        with pytest.raises(jax.errors.JaxRuntimeError, match="not whole vectors"):
            jax.block_until_ready(native.rms_norm(jnp.ones((1, 65)), jnp.ones(65), 1e-5))


def make_index(rows: list[int], lengths: list[int], most_members: int, num_prompts: int) -> PromptIndex:
    """Slots with their prompts and how much of them is cached; a slot of length −1 is not live."""
    arrays = jnp.asarray(rows), jnp.asarray(lengths), jnp.asarray(lengths) >= 0
    return index_prompts(*arrays, num_prompts=num_prompts, most_members=most_members, num_replicas=1)


@needs_compiler
class TestDecodeAttention:
    @pytest.mark.parametrize(("kv_heads", "group", "dim", "rows", "lengths", "own_length", "prompt_length"), [
        (1, 1, 16, [0], [0], 16, 16),
        (3, 3, 64, [0, 1, 2, 3], [64, 1, 0, 33], 100, 64),
        (2, 4, 128, [1, 1, 0], [50, 50, 7], 65, 64),
        (1, 7, 80, [1, 1], [128, 128], 1, 128),
        (2, 2, 32, [2, 0, 2, 2, 0], [31, 5, 31, 31, 5], 20, 32),
        (1, 8, 96, [0] * 12, [300] * 12, 70, 300),
        (1, 2, 16, [0, 0, 1, 1], [9, -1, -1, -1], 16, 16),
    ])  # fmt: skip
    def test_equals_the_attention_of_the_model(self, random, kv_heads, group, dim, rows, lengths, own_length, prompt_length):
        slots, prompts = len(rows), max(rows) + 1
        is_live = np.array(lengths) >= 0
        index = make_index(rows, lengths, slots, prompts)
        positions = random.integers(0, own_length, slots)
        positions[0] = own_length - 1
        new = [normal(random, slots, heads, dim) for heads in (kv_heads * group, kv_heads, kv_heads)]
        clean = [normal(random, slots, kv_heads, own_length, dim) for _ in range(2)]
        shared = [normal(random, prompts, kv_heads, prompt_length, dim) for _ in range(2)]
        # What lies behind a slot's position, or a prompt's end, belongs to nobody and must not be read.
        is_seen = np.arange(own_length) <= positions[:, None]
        is_prompt = np.arange(prompt_length) < np.asarray(index.lengths)[:, None]
        caches = [jnp.where(is_seen[:, None, :, None], cache, np.nan) for cache in clean]
        caged = [jnp.where(is_prompt[:, None, :, None], cache, np.nan) for cache in shared]
        mixed, keys, values = jax.jit(native.decode_attention)(*new, *caches, jnp.asarray(positions), *caged, index)

        written = write(LayerCache(*clean), new[1][:, None], new[2][:, None], jnp.asarray(positions))
        expected = attend_prompt_and_own(new[0], written, jnp.asarray(positions), LayerCache(*shared), index)
        np.testing.assert_allclose(mixed[is_live], expected[is_live], rtol=3e-5, atol=3e-6)
        assert not np.asarray(mixed)[~is_live].any()
        for slot in np.flatnonzero(is_live):
            for got, wanted in ((keys, written.keys), (values, written.values)):
                np.testing.assert_array_equal(got[slot, :, : positions[slot] + 1], wanted[slot, :, : positions[slot] + 1])
                assert np.isnan(got[slot, :, positions[slot] + 1 :]).all()

    @pytest.mark.parametrize("factor", [1e-30, 1.0, 30.0, 1e4])
    def test_scores_of_any_size(self, random, factor):
        """From all equal to one that takes everything; softmax in float32 by the largest score."""
        queries, key, value = (normal(random, 2, 2, 16) for _ in range(3))
        own, prompts = ([normal(random, 2, 2, length, 16) for _ in range(2)] for length in (40, 24))
        positions, queries, index = jnp.array([39, 17]), queries * np.float32(factor), make_index([0, 1], [24, 3], 1, 2)
        mixed, *written = native.decode_attention(queries, key, value, own[0], own[1], positions, prompts[0], prompts[1], index)
        expected = attend_prompt_and_own(queries, LayerCache(*written), positions, LayerCache(*prompts), index)
        np.testing.assert_allclose(mixed, expected, rtol=1e-4, atol=1e-5)

    def test_a_slot_does_not_depend_on_its_neighbours(self, random):
        """Nor on who else reads its prompt."""
        arrays = [normal(random, 6, *shape) for shape in ((9, 64), (3, 64), (3, 64), (3, 70, 64), (3, 70, 64))]
        prompts = [normal(random, 2, 3, 50, 64) for _ in range(2)]
        positions, rows, lengths = [0, 69, 5, 30, 31, 32], [0, 1, 0, 0, 1, 0], [50, 23, 50, 50, 23, 50]
        decode = jax.jit(native.decode_attention)
        together = np.asarray(decode(*arrays, jnp.array(positions), *prompts, make_index(rows, lengths, 4, 2))[0])
        for slot in range(6):
            one = [array[slot : slot + 1] for array in arrays]
            index = make_index([rows[slot]], [lengths[slot]], 1, 2)
            alone = decode(*one, jnp.array(positions[slot : slot + 1]), *prompts, index)[0]
            np.testing.assert_array_equal(together[slot : slot + 1], alone)

    def test_donated_caches_are_written_in_place(self, random):
        arrays = [normal(random, 2, *shape) for shape in ((2, 16), (2, 16), (2, 16), (2, 64, 16), (2, 64, 16))]
        rest = jnp.zeros(2, jnp.int32), *arrays[3:], make_index([0, 1], [5, 5], 1, 2)
        step = jax.jit(native.decode_attention, donate_argnums=(3, 4)).lower(*arrays, *rest).compile()
        cache_bytes = arrays[3].nbytes + arrays[4].nbytes
        memory = step.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 4

    def test_heads_that_are_no_whole_vectors_are_refused(self):
        new, cache = jnp.ones((1, 1, 17)), jnp.ones((1, 1, 8, 17))
        assert not native.can_attend(new, cache)
        arguments = new, new, new, cache, cache, jnp.zeros(1, jnp.int32), cache, cache, make_index([0], [0], 1, 1)
        with pytest.raises(jax.errors.JaxRuntimeError, match="not whole vectors"):
            jax.block_until_ready(native.decode_attention(*arguments))


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 processors have registers of several widths")
def test_narrower_registers_too(tmp_path):
    """The same tests with the code for older x86 processors than this one: 8 and 4 numbers in a register instead of 16 or 8."""
    compiler = native._find_compiler()[0]
    for lanes, flag in ((8, "-mno-avx512f"), (4, "-mno-avx")):
        if lanes < native.num_lanes():
            environment = {**os.environ, "CXX": f"{compiler} {flag}", "LLAMARL_CACHE": str(tmp_path), "EXPECTED_LANES": str(lanes)}
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                __file__,
                "-k",
                "Linear or Swiglu or Norm or Attention or lanes",
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stdout[-3000:]


@needs_compiler
def test_lanes_are_those_expected():
    assert native.num_lanes() == int(os.environ.get("EXPECTED_LANES", native.num_lanes()))


def make_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No compiled library is known to this process, and none is in the cache folder."""
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    monkeypatch.setattr(native, "find_obstacle", native.find_obstacle.__wrapped__)
    return tmp_path / "cache" / "kernels"


class TestCompilation:
    @needs_compiler
    def test_is_done_once(self, fresh):
        library = native.build(fresh)
        before = library.stat().st_mtime_ns
        assert native.build(fresh) == library
        assert library.stat().st_mtime_ns == before
        assert list(fresh.iterdir()) == [library]

    def test_without_a_compiler(self, fresh, monkeypatch):
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        with pytest.raises(NativeKernelError, match=r"no C\+\+ compiler found \(c\+\+, g\+\+, clang\+\+\); install one"):
            native.build(fresh)

    def test_with_the_name_of_one_that_is_not_there(self, fresh, monkeypatch):
        monkeypatch.setenv("CXX", "nonesuch++ -O1")
        assert "CXX='nonesuch++ -O1'" in (native.find_obstacle() or "")
        assert not fresh.exists()

    def test_with_one_that_fails(self, fresh, monkeypatch, tmp_path):
        script = 'case "$*" in *--version*) echo 1.0;; *) echo "no vectors here" >&2; exit 3;; esac'
        monkeypatch.setenv("CXX", make_compiler(tmp_path, script))
        with pytest.raises(NativeKernelError, match=r"failed with status 3: no vectors here; set CXX to another C\+\+17 compiler"):
            native.build(fresh)
        assert list(fresh.iterdir()) == []

    def test_with_arguments(self, fresh, monkeypatch, tmp_path):
        monkeypatch.setenv("CXX", f"{make_compiler(tmp_path, 'exit 4')} -one -two")
        with pytest.raises(NativeKernelError, match=r"compiler -one -two --version` failed with status 4"):
            native.build(fresh)

    def test_a_folder_that_cannot_be_written(self, fresh, monkeypatch, tmp_path):
        monkeypatch.setenv("CXX", make_compiler(tmp_path, "exit 0"))
        (tmp_path / "file").write_text("")
        with pytest.raises(NativeKernelError, match="set LLAMARL_CACHE to a folder that can be written"):
            native.build(tmp_path / "file" / "kernels")

    def test_a_library_that_does_not_load_is_named(self, fresh, monkeypatch, tmp_path):
        script = 'while [ "$#" -gt 0 ]; do if [ "$1" = -o ]; then echo broken > "$2"; fi; shift; done'
        monkeypatch.setenv("CXX", make_compiler(tmp_path, script))
        with pytest.raises(NativeKernelError, match=r"cpu-[0-9a-f]{16}\.so does not load .*; delete it, and it is compiled again"):
            native._library()

    def test_another_compiler_makes_another_library(self, fresh, monkeypatch, tmp_path):
        script = 'while [ "$#" -gt 0 ]; do if [ "$1" = -o ]; then touch "$2"; fi; shift; done'
        made = set()
        for version in ("1.0", "2.0"):
            monkeypatch.setenv("CXX", make_compiler(tmp_path, f'[ "$1" = --version ] && echo {version}\n{script}'))
            made.add(native.build(fresh))
        assert len(made) == 2
        assert set(fresh.iterdir()) == made


class TestChoice:
    def test_is_native_where_it_can_be(self):
        assert choose_kernels(EngineConfig(dtype="float32"), ONE_DEVICE, CONFIG) == ("native" if HAS_KERNELS else "xla")
        assert choose_kernels(EngineConfig(dtype="float32", kernels="xla"), ONE_DEVICE, CONFIG) == "xla"

    def test_is_xla_on_several_devices_and_in_bfloat16(self):
        two = build_mesh(jax.devices()[:2], {"data": 2, "tensor": 1})
        assert choose_kernels(EngineConfig(dtype="float32"), two, CONFIG) == "xla"
        assert choose_kernels(EngineConfig(dtype="bfloat16"), ONE_DEVICE, CONFIG) == "xla"
        with pytest.raises(ValueError, match=r"'native', but they run on a single CPU device, and the generator mesh is 2 × cpu"):
            choose_kernels(EngineConfig(dtype="float32", kernels="native"), two, CONFIG)
        with pytest.raises(ValueError, match=r"'native', but they compute in float32, and engine.dtype is 'bfloat16'"):
            choose_kernels(EngineConfig(dtype="bfloat16", kernels="native"), ONE_DEVICE, CONFIG)

    def test_without_a_compiler_xla_is_taken_and_that_is_said(self, fresh, monkeypatch, caplog):
        monkeypatch.setenv("CXX", "nonesuch++")
        with caplog.at_level(logging.WARNING):
            assert choose_kernels(EngineConfig(dtype="float32"), ONE_DEVICE, CONFIG) == "xla"
        assert "no C++ compiler found" in caplog.text
        with pytest.raises(ValueError, match=r"'native', but no C\+\+ compiler found .*; or choose 'auto'"):
            choose_kernels(EngineConfig(dtype="float32", kernels="native"), ONE_DEVICE, CONFIG)
