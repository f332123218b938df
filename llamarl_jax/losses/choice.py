"""The policy losses that a config can choose from.

Each config has `loss(inputs) -> LossOutput`, a pure function of its fields and the inputs, and `is_off_policy_safe`, which says whether the
loss corrects for tokens that another policy sampled.
"""

from __future__ import annotations

from typing import TypeAlias

from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.cispo import CispoConfig
from llamarl_jax.losses.gspo import GspoConfig
from llamarl_jax.losses.policy_gradient import ReinforceConfig
from llamarl_jax.losses.ppo import DecoupledPpoConfig, PpoClipConfig
from llamarl_jax.losses.truncated_is import GeometricMaskConfig, TruncatedIsConfig

LossConfig: TypeAlias = (
    AipoConfig | CispoConfig | DecoupledPpoConfig | GeometricMaskConfig | GspoConfig | PpoClipConfig | ReinforceConfig | TruncatedIsConfig
)
