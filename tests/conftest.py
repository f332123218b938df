"""Every test process has eight virtual CPU devices and checks shapes at run time (jaxtyping + beartype)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping

jax.config.update("jax_num_cpu_devices", 8)

# Installed before any module of the package is imported, so that all annotated array arguments are checked.
jaxtyping.install_import_hook(
    ["llamarl_jax.models", "llamarl_jax.engine", "llamarl_jax.losses", "llamarl_jax.weights", "llamarl_jax.train_step"], "beartype.beartype"
)
