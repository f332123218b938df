"""Losses, advantages and their diagnostics; import the module you need (`advantages` must stay free of JAX)."""
