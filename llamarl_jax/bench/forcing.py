"""One batch of tokens through the trainer's network and through decoders of several kinds, which see the very same tokens.

The trainer's side is what a gradient step computes: the stacked form, float32 masters, whole rows, `token_logprobs`. The decoder's side is
what the engine's prefill computes: the list form, the exported weights of a mode, and a KV cache of a type, into which every key and value
is rounded before it is read. All tokens of a row go through it at once; that gives what the decode steps give one by one, to float32
rounding (`recorded_distance` in the report compares both).

Logits are the largest arrays by far, so rows go through the head in chunks: as many rows at once as keep one float32 array of
rows × tokens × vocabulary within `CHUNK_BYTES`, and at least one. A program holds about six such arrays (both logits, both log-softmaxes,
their products). Of the trainer only the final hidden states are kept for all rows, which are smaller by vocabulary / width; each comparison
applies the head to them again. So the masters, one decoder's weights and one chunk are all that is in memory at any time.

Dimensions: R rows of the batch, B rows of a chunk, T tokens of a row, D model; N completion tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from llamarl_jax.bench.distance import Distance, Divergence, divergence, summarise
from llamarl_jax.data.sources import fingerprint_of
from llamarl_jax.losses.logprobs import token_logprobs
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.kv_cache import CacheType, init_cache
from llamarl_jax.models.transformer import Params, TransformerSpec
from llamarl_jax.types import Completion, Prompt

CHUNK_BYTES = 128 << 20
TEMPERATURE = 1.0


@dataclass(frozen=True)
class ForcedBatch:
    """Prompts with their completions, a pair a row, padded at the end.

    Attributes:
        segment_ids: 1 on prompt and completion, 0 on padding.
        is_completion: where the completions' tokens are.
        recorded_logprobs: what the engine noted for them when it sampled them, in row order.
    """

    token_ids: Int[np.ndarray, "R T"]
    segment_ids: Int[np.ndarray, "R T"]
    is_completion: Bool[np.ndarray, "R T"]
    recorded_logprobs: Float[np.ndarray, " N"]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> ForcedBatch:
        """Puts each prompt and its completion into a row."""
        length = max(len(p.token_ids) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True))
        shape = (len(prompts), length)
        token_ids, segment_ids, is_completion = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            start, end = len(prompt.token_ids), len(prompt.token_ids) + len(completion.token_ids)
            token_ids[row, :end] = np.concatenate([prompt.token_ids, completion.token_ids])
            segment_ids[row, :end] = 1
            is_completion[row, start:end] = True
        return cls(token_ids, segment_ids, is_completion, np.concatenate([c.behaviour_logprobs for c in completions]))

    @property
    def is_predicting(self) -> Bool[np.ndarray, "R T"]:
        """Where the logits that the completions' tokens were drawn from are: one index before each."""
        return np.pad(self.is_completion[:, 1:], ((0, 0), (0, 1)))

    @property
    def fingerprint(self) -> str:
        """Short hash of the ids; equal for equal batches."""
        return fingerprint_of(self.token_ids.tolist(), self.is_completion.tolist())


class Forced(NamedTuple):
    """What one chunk gives: log-probs aligned to their tokens, divergences to the logits that they compare."""

    trainer_logprobs: Float[Array, "B T"]
    decoder_logprobs: Float[Array, "B T"]
    divergence: Divergence


class Trainer:
    """The trainer's network on a batch; its hidden states are computed once."""

    def __init__(self, spec: TransformerSpec, params: Params, batch: ForcedBatch) -> None:
        """Runs the stacked form over all rows.

        Args:
            params: float32 masters.
        """
        self.spec, self.params, self.batch = spec, params, batch
        self.rows_per_chunk = rows_per_chunk(spec.config, *batch.token_ids.shape)
        run = jax.jit(self._run)
        self._hidden = [run(params, *arrays) for arrays in self._chunks()]

    def distance_to(self, spec: TransformerSpec, params: Params, dtype: DTypeLike, cache_dtype: CacheType) -> Distance:
        """Forces the batch through a decoder and returns its distance to the trainer.

        Args:
            spec: the list form.
            params: exported weights.
            dtype: of the activations.
            cache_dtype: of the KV cache.
        """
        compare = jax.jit(partial(self._compare, spec, dtype, cache_dtype))
        parts = [
            jax.device_get(compare(self.params, params, hidden, *arrays))
            for hidden, arrays in zip(self._hidden, self._chunks(), strict=True)
        ]
        whole: Forced = jax.tree.map(lambda *xs: np.concatenate(xs)[: len(self.batch.token_ids)], *parts)
        difference = np.asarray(whole.trainer_logprobs - whole.decoder_logprobs)[self.batch.is_completion]
        return summarise(difference, *(np.asarray(x)[self.batch.is_predicting] for x in whole.divergence))

    def recorded_distance(self) -> tuple[float, float]:
        """Returns mean and maximum of |log π − log μ| in nats, where μ is what the engine noted when it sampled the tokens."""
        logprobs = jax.jit(lambda params, hidden, ids, segments: self._logprobs(self.spec.bind(params).logits(hidden), ids, segments))
        parts = [np.asarray(logprobs(self.params, h, *arrays)) for h, arrays in zip(self._hidden, self._chunks(), strict=True)]
        whole = np.concatenate(parts)[: len(self.batch.token_ids)]
        distance = np.abs(whole[self.batch.is_completion].astype(np.float64) - self.batch.recorded_logprobs)
        return float(distance.mean()), float(distance.max())

    def _chunks(self) -> Iterator[tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]]:
        """Yields ids and segments of a chunk; the last one is filled with padding, so that there is one shape to compile."""
        for first in range(0, len(self.batch.token_ids), self.rows_per_chunk):
            part = slice(first, first + self.rows_per_chunk)
            missing = self.rows_per_chunk - len(self.batch.token_ids[part])
            ids, segments = (np.pad(x[part], ((0, missing), (0, 0))) for x in (self.batch.token_ids, self.batch.segment_ids))
            yield ids, segments

    def _run(self, params: Params, token_ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        return self.spec.bind(params)(token_ids, positions, segment_ids)

    def _compare(
        self,
        spec: TransformerSpec,
        dtype: DTypeLike,
        cache_dtype: CacheType,
        trainer_params: Params,
        decoder_params: Params,
        hidden: Float[Array, "B T D"],
        token_ids: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Forced:
        decoder = spec.bind(decoder_params)
        num_rows, length = token_ids.shape
        cache = init_cache(spec.config, num_rows, length, cache_dtype)
        # Padding stands behind a row's tokens, so no token sees it.
        decoder_hidden, _ = decoder.extend(token_ids, jnp.zeros(num_rows, jnp.int32), cache, dtype=dtype)
        decoder_logits, trainer_logits = decoder.logits(decoder_hidden), self.spec.bind(trainer_params).logits(hidden)
        return Forced(
            self._logprobs(trainer_logits, token_ids, segment_ids),
            self._logprobs(decoder_logits, token_ids, segment_ids),
            divergence(trainer_logits, decoder_logits),
        )

    @staticmethod
    def _logprobs(logits: Float[Array, "B T V"], token_ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return token_logprobs(logits, token_ids, segment_ids, TEMPERATURE)[0]


def rows_per_chunk(config: ModelConfig, num_rows: int, length: int) -> int:
    """Returns how many of the rows go through the head at once; see the module docstring."""
    return max(1, min(num_rows, CHUNK_BYTES // (4 * length * config.vocab_size)))
