"""Random loss inputs, for the tests of this folder."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.losses.inputs import LossInputs, LossOutput

Loss = Callable[[LossInputs], LossOutput]


def inputs_of(logprobs, behaviour=None, *, proximal=None, advantages=None, mask=None, weights=None, segments=None) -> LossInputs:
    """Builds inputs from nested lists; by default on-policy, advantage 1, everything a loss token of one segment per row."""
    logprobs = jnp.asarray(logprobs, jnp.float32)
    mask = np.ones(logprobs.shape) if mask is None else mask
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=jnp.asarray(logprobs if behaviour is None else behaviour, jnp.float32),
        proximal_logprobs=jnp.asarray(logprobs if proximal is None else proximal, jnp.float32),
        advantages=jnp.asarray(np.ones(logprobs.shape) if advantages is None else advantages, jnp.float32),
        loss_mask=jnp.asarray(mask, jnp.float32),
        token_weights=jnp.asarray(mask if weights is None else weights, jnp.float32),
        segment_ids=jnp.asarray(np.ones(logprobs.shape) if segments is None else segments, jnp.int32),
    )


def random_inputs(seed: int, num_rows: int = 3, length: int = 12, *, spread: float = 1.0) -> LossInputs:
    """Rows of one to four packed trajectories, each with prompt tokens (mask 0) first, then padding."""
    rng = np.random.default_rng(seed)
    segments, mask, advantages = (np.zeros((num_rows, length)) for _ in range(3))
    for row in range(num_rows):
        borders = np.sort(rng.choice(np.arange(2, length + 1), size=rng.integers(1, 5), replace=False))
        for index, (start, stop) in enumerate(zip([0, *borders[:-1]], borders, strict=True)):
            segments[row, start:stop] = index + 1
            mask[row, rng.integers(start, stop) : stop] = 1
            advantages[row, start:stop] = rng.normal()
    logprobs = -rng.exponential(1.0, (num_rows, length))
    return inputs_of(
        logprobs,
        logprobs + spread * rng.normal(size=logprobs.shape),
        proximal=logprobs + 0.3 * rng.normal(size=logprobs.shape),
        advantages=advantages,
        mask=mask,
        weights=mask * rng.uniform(0.5, 2.0, size=mask.shape),
        segments=segments,
    )


@functools.cache  # a bound method is found again only if its object is the same one
def _gradient(loss: Loss):
    return jax.jit(jax.grad(lambda logprobs, inputs: loss(inputs._replace(logprobs=logprobs)).loss_sum))


def gradient(loss: Loss, inputs: LossInputs) -> np.ndarray:
    """The gradient of the loss sum by `logprobs`, [B, L]; compiled once per loss and shape."""
    return np.asarray(_gradient(loss)(inputs.logprobs, inputs))


@functools.cache
def _output(loss: Loss):
    return jax.jit(loss)


def output(loss: Loss, inputs: LossInputs) -> LossOutput:
    """The loss, compiled once per loss and shape."""
    return _output(loss)(inputs)


def rows_of(inputs: LossInputs, rows: slice) -> LossInputs:
    """Some rows of the inputs."""
    return LossInputs(*(value[rows] for value in inputs))
