"""Reinforcement learning for language models in JAX, asynchronous on two device meshes, after LlamaRL (arXiv 2505.24034)."""

__version__ = "0.1.0"
