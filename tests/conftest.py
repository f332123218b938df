"""Every test process has eight virtual CPU devices and checks shapes at run time (jaxtyping + beartype).

Compiled programs are kept for the length of the session: many tests start whole runs, which compile the same ones. Where several processes
share the tests (pytest -n), they share them too.
"""

import os
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping

jax.config.update("jax_num_cpu_devices", 8)
if "LLAMARL_TESTS_COMPILED" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="llamarl_tests_")
    os.environ["LLAMARL_TESTS_COMPILED"] = _compiled.name
jax.config.update("jax_compilation_cache_dir", os.environ["LLAMARL_TESTS_COMPILED"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Installed before any module of the package is imported, so that all annotated array arguments are checked.
jaxtyping.install_import_hook(
    ["llamarl_jax.models", "llamarl_jax.engine", "llamarl_jax.losses", "llamarl_jax.weights", "llamarl_jax.train_step"], "beartype.beartype"
)


def pytest_sessionfinish() -> None:
    """Saves what this process executed: pytest -n kills a process that takes more than ten seconds to end."""
    if (coverage := sys.modules.get("coverage")) and (measured := coverage.Coverage.current()):
        measured.save()
