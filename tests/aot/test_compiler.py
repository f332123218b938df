import os
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamarl_jax.aot.compiler import compile_lowered, parse_warnings
from llamarl_jax.meshes import build_mesh
from tests.aot.programs import C, D, S, cache_in_place, compile_program


def test_a_program_leaves_its_text_memory_and_time(capfd):
    mesh = build_mesh(jax.devices()[:1], {"data": 1})
    compiled = compile_lowered(cache_in_place(mesh))
    cache, x = S * C * D * 4, S * D * 4
    assert (compiled.argument_bytes, compiled.aliased_bytes) == (cache + x, cache)
    assert cache + x <= compiled.output_bytes <= cache + x + 64
    assert compiled.text.startswith("HloModule jit_run")
    assert compiled.compile_s > 0
    assert compiled.warnings == ()
    assert capfd.readouterr().err == ""


def test_a_program_is_compiled_each_time_and_the_cache_is_on_again_afterwards():
    """JAX looks at the option that turns its cache off only once: a second compilation gave no dump, and a first one ended all caching."""
    text = compile_program("tensor_parallel_loop", jax.devices()).buffer_assignment
    assert compile_program("tensor_parallel_loop", jax.devices()).buffer_assignment.startswith("BufferAssignment:")
    assert text.startswith("BufferAssignment:")
    assert jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    hits: list[str] = []

    def note(event: str, **_: object) -> None:
        hits.append(event)

    jax.monitoring.register_event_listener(note)
    for _ in range(2):
        jax.jit(lambda x: jnp.sin(x) * 3.25 + 1).lower(jnp.ones(7)).compile()
    jax.monitoring.unregister_event_listener(note)
    assert "/jax/compilation_cache/cache_hits" in hits


def test_a_compiler_that_says_nothing_is_an_error():
    silent: Any = SimpleNamespace(compile=lambda compiler_options: SimpleNamespace(as_text=lambda: None, memory_analysis=lambda: None))
    with pytest.raises(RuntimeError, match=r"no text, memory or buffer assignment.*llamarl_jax\.aot\.targets\.topology"):
        compile_lowered(silent)


def test_warnings_of_the_log_are_kept_once_and_those_of_a_missing_driver_left_out(monkeypatch):
    log = """
I0000 00:00:1.000000   17 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.
W1201 00:00:1.000000   17 spmd_partitioner.cc:652] Involuntary full rematerialization. The compiler cannot go from one to the other
 a second line
E1201 00:00:1.000000   17 some-file.cc:1] failed
W1201 00:00:2.000000   17 spmd_partitioner.cc:652] Involuntary full rematerialization. The compiler cannot go from one to the other
W1201 00:00:2.000000   17 cudart_stub.cc:31] nothing
"""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert parse_warnings(log) == ("Involuntary full rematerialization. The compiler cannot go from one to the other", "failed")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    assert parse_warnings("") == ("TF_CPP_MIN_LOG_LEVEL is above 1, which hides the compiler's warnings; unset it",)


def test_what_is_written_to_standard_error_meanwhile_is_read_as_the_log():
    def compile_and_warn(compiler_options: Any) -> Any:
        assert "xla_dump_to" in compiler_options
        os.write(2, b"W1201 00:00:1.000000   17 a.cc:1] careful\n")
        sys.stderr.write("not XLA's\n")
        raise KeyError("stopped")

    broken: Any = SimpleNamespace(compile=compile_and_warn)
    with pytest.raises(KeyError, match="stopped"):
        compile_lowered(broken)
