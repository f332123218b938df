"""What the summed loss is divided by: token weights on the device, one denominator of the whole batch on the host.

Every loss is Σ weight_t · loss_t / denominator. With N trajectories, len_i loss tokens in trajectory i, and T loss tokens in all:

| setting | weight of a token | denominator | what counts the same |
|---|---|---|---|
| `token_mean` (default) | 1 | T | every token of the batch |
| `sequence_mean` | 1 / len_i | N | every trajectory |
| `constant` | 1 | N · max_tokens | every token, whatever the lengths of the others |

Sources: `token_mean` DAPO (Yu et al., arXiv 2503.14476); `sequence_mean` GRPO (Shao et al., "DeepSeekMath", arXiv 2402.03300); `constant`
Dr. GRPO (Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783).

The three differ in size as well as in kind: for trajectories of one length `token_mean` and `sequence_mean` are equal, while `constant` is
smaller by length / max_tokens, so a learning rate tuned for one does not fit another. (Adam hides most of that; gradient clipping does
not.)

The denominator counts the whole batch, never a microbatch. Trajectories without a loss token count nowhere.

Dimensions: B rows, L tokens of a row.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamarl_jax.losses.segments import segment_sum
from llamarl_jax.types import TrajectoryBatch

Normalisation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(loss_mask: Float[Array, "B L"], segment_ids: Int[Array, "B L"], normalisation: Normalisation) -> Float[Array, "B L"]:
    """Returns the weight of each token in the summed loss (0 outside the mask); see the table above."""
    mask = (loss_mask > 0).astype(jnp.float32)
    if normalisation == "sequence_mean":
        return mask / jnp.maximum(segment_sum(mask, segment_ids), 1.0)
    return mask


def denominator(batch: TrajectoryBatch, normalisation: Normalisation, *, max_tokens: int) -> float:
    """Returns what the weighted sum over the whole batch is divided by.

    A batch without loss tokens gives 1, and so a gradient of exactly 0.

    Args:
        batch: all microbatches of the step, on the host; of several processes, all rows.
        normalisation: see the table above.
        max_tokens: longest possible completion; only `constant` uses it.
    """
    is_loss = np.asarray(batch.loss_mask) > 0
    if normalisation == "token_mean":
        return float(max(is_loss.sum(), 1))
    rows = np.broadcast_to(np.arange(len(is_loss))[:, None], is_loss.shape)
    pairs = np.stack([rows[is_loss], np.asarray(batch.segment_ids)[is_loss]])
    num_trajectories = float(max(np.unique(pairs, axis=1).shape[1], 1))
    return num_trajectories if normalisation == "sequence_mean" else num_trajectories * max_tokens
