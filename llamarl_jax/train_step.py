"""The jitted gradient and optimizer step on the trainer mesh.

One optimizer step is: start from zero sums, `accumulate` once per microbatch, `update` once. Three properties follow from this shape.

* The loss of a microbatch is a *sum* over its tokens, divided by a denominator that counts the whole batch, so the gradient is the same for
  any split into microbatches, any packing and any mesh.
* A microbatch has one fixed shape, so one program serves every batch, however many rows packing needed.
* Microbatches are dispatched one after the other without waiting; only `update`'s metrics are read.

A step whose gradient is not finite leaves parameters and optimizer state as they are and says so in its metrics.

Dimensions: B rows of a microbatch, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from llamarl_jax.data.packing import Packing
from llamarl_jax.losses.aipo import AipoConfig
from llamarl_jax.losses.choice import LossConfig
from llamarl_jax.losses.diagnostics import policy_diagnostics
from llamarl_jax.losses.entropy import entropy_bonus
from llamarl_jax.losses.inputs import LossInputs
from llamarl_jax.losses.kl import KlConfig, kl_penalty
from llamarl_jax.losses.logprobs import token_logprobs
from llamarl_jax.losses.normalisation import Normalisation, token_weights
from llamarl_jax.meshes import named_sharding, replicated
from llamarl_jax.models.transformer import Params, TransformerSpec
from llamarl_jax.types import TrajectoryBatch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and clipping by global norm."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or decay to zero at the last step."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0 to its peak."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise ValueError(
                f"optimizer.learning_rate = {self.learning_rate} and optimizer.max_grad_norm = {self.max_grad_norm}: both must be above 0"
            )

    def learning_rate_schedule(self, num_steps: int) -> optax.Schedule:
        """Returns the learning rate as a function of the number of committed steps."""
        num_decay = max(num_steps - self.warmup_steps, 1)
        after = {
            "constant": lambda: optax.constant_schedule(self.learning_rate),
            "linear": lambda: optax.linear_schedule(self.learning_rate, 0.0, num_decay),
            "cosine": lambda: optax.cosine_decay_schedule(self.learning_rate, num_decay),
        }[self.schedule]()
        if not self.warmup_steps:
            return after
        # Step 0 already moves: a first update of size 0 would waste a batch.
        warmup = optax.linear_schedule(self.learning_rate / self.warmup_steps, self.learning_rate, self.warmup_steps - 1 or 1)
        return optax.join_schedules([warmup, after], [self.warmup_steps])

    def build(self) -> optax.GradientTransformation:
        """Builds the optax transformation; its updates are still to be multiplied by minus the learning rate of the step."""
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.scale_by_adam(self.b1, self.b2, self.epsilon),
            optax.add_decayed_weights(self.weight_decay),
        )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The gradient step."""

    loss: LossConfig = field(default_factory=AipoConfig)
    """Policy loss."""
    kl: KlConfig = field(default_factory=KlConfig)
    """Penalty for leaving the reference policy; coefficient 0 keeps no reference weights."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, per token."""
    normalisation: Normalisation = "token_mean"
    """What the summed loss is divided by; see `llamarl_jax.losses.normalisation`."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    rows_per_microbatch: int = 8
    """Rows of one microbatch; a multiple of trainer_data × trainer_fsdp."""
    row_length: int = 0
    """Tokens of a row; 0 takes the longest prompt plus the longest completion."""
    packing: Packing = "shared_prompts"
    """`shared_prompts`: several trajectories in a row, and a group's prompt in it once; `trajectories`: each with its prompt; `none`: a row
    each. The gradient is the same to rounding."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and of the weights inside matrix products; master weights are float32 always."""
    is_rematerialised: bool = False
    """Recomputes each layer in the backward pass: less memory, a third more work."""
    leaves_out_zero_advantages: bool = False
    """Do not compute trajectories of advantage 0: their gradient is exactly 0, and they still count in the denominator. Policy metrics
    are then over the others. Not possible with a KL or entropy term, which act on every trajectory."""
    max_skipped_steps: int = 3
    """Consecutive steps with a non-finite gradient after which the run fails."""

    def __post_init__(self) -> None:
        if self.leaves_out_zero_advantages and (self.kl.coefficient or self.entropy_coefficient):
            raise ValueError(
                f"trainer.leaves_out_zero_advantages is on, but kl.coefficient = {self.kl.coefficient} and entropy_coefficient = "
                f"{self.entropy_coefficient} act on every trajectory; switch it off or set both to 0"
            )


class TrainState(NamedTuple):
    """What the optimizer changes; donated to every update. `step` counts committed steps: the weight version."""

    params: Params
    opt_state: Any
    step: Int[Array, ""]


class StepSums(NamedTuple):
    """Sums over the microbatches of a step: gradient, loss, and metrics by name."""

    grads: Params
    loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]


class TrainStep:
    """Jitted functions of the trainer for one transformer on one mesh."""

    def __init__(self, spec: TransformerSpec, mesh: Mesh, config: TrainerConfig, *, num_steps: int, temperature: float) -> None:
        """Builds the functions; compiles and allocates nothing.

        Args:
            spec: the stacked form.
            num_steps: length of the learning-rate schedule in optimizer steps.
            temperature: of the behaviour policy; π is taken at the same one.

        Raises:
            ValueError: the rows of a microbatch cannot be split over the mesh.
        """
        num_replicas = mesh.shape["data"] * mesh.shape["fsdp"]
        if config.rows_per_microbatch % num_replicas:
            raise ValueError(
                f"trainer.rows_per_microbatch = {config.rows_per_microbatch} cannot be split over {num_replicas} devices of the axes "
                f"data × fsdp; choose a multiple of {num_replicas}"
            )
        self.spec, self.mesh, self.config = spec, mesh, config
        self._temperature = np.float32(temperature)
        self._learning_rate = config.optimizer.learning_rate_schedule(num_steps)
        self._optimizer = config.optimizer.build()
        self._dtype = jnp.dtype(config.compute_dtype)
        self.state_shardings = self._state_shardings()
        self.batch_sharding = named_sharding(mesh, ("rows", None), (config.rows_per_microbatch, 1))
        self._init_opt = jax.jit(self._optimizer.init, out_shardings=self.state_shardings.opt_state)
        # Adding is a program of its own: inside the gradient's, the gradient would be compiled twice, with and without sums to add to.
        sums = StepSums(self.state_shardings.params, replicated(mesh), replicated(mesh))  # pyright: ignore[reportArgumentType]
        self._gradient = jax.jit(self._microbatch_sums, out_shardings=sums)
        self._add = jax.jit(_add_sums, donate_argnums=(0,), out_shardings=sums)
        self._update = jax.jit(self._apply, donate_argnums=(0,), out_shardings=(self.state_shardings, replicated(mesh)))

    def init_state(self, params: Params) -> TrainState:
        """Returns the state of step 0 around float32 parameters that lie in this mesh's sharding already."""
        with jax.set_mesh(self.mesh):
            return TrainState(params, self._init_opt(params), jax.device_put(np.int32(0), replicated(self.mesh)))

    def abstract_state(self) -> TrainState:
        """Returns shapes, types and shardings of the state, for restoring a checkpoint."""
        opt_state = jax.eval_shape(self._optimizer.init, self.spec.shapes)
        shapes = TrainState(self.spec.shapes, opt_state, jax.ShapeDtypeStruct((), jnp.int32))  # pyright: ignore[reportArgumentType]
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.state_shardings)

    def place(self, microbatch: TrajectoryBatch) -> TrajectoryBatch:
        """Puts a host microbatch on the mesh."""
        return jax.device_put(microbatch, self.batch_sharding)

    def accumulate(
        self, params: Params, sums: StepSums | None, microbatch: TrajectoryBatch, denominator: float, reference: Params | None
    ) -> StepSums:
        """Adds one placed microbatch's gradient to the sums (None starts them).

        Args:
            denominator: what the summed loss of the whole batch is divided by.
            reference: parameters of the reference policy, where the KL term is on.
        """
        with jax.set_mesh(self.mesh):
            new = self._gradient(params, microbatch, np.float32(denominator), reference)
            return new if sums is None else self._add(sums, new)

    def update(self, state: TrainState, sums: StepSums) -> tuple[TrainState, dict[str, Array]]:
        """Commits one optimizer step; returns the new state and device scalars (summed and maximal metrics included)."""
        with jax.set_mesh(self.mesh):
            return self._update(state, sums)

    def logprobs(self, params: Params, microbatch: TrajectoryBatch) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
        """Returns log-probabilities and entropies of a placed microbatch under `params`; not on the training path."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._logprobs)(params, microbatch)

    def _state_shardings(self) -> TrainState:
        params = self.spec.shardings(self.mesh)
        opt_shapes = jax.eval_shape(self._optimizer.init, self.spec.shapes)
        whole = replicated(self.mesh)
        opt_state = optax.tree.map_params(
            self._optimizer, lambda _, sharding: sharding, opt_shapes, params, transform_non_params=lambda _: whole
        )
        return TrainState(params, opt_state, whole)  # pyright: ignore[reportArgumentType]

    def _logprobs(self, params: Params, batch: TrajectoryBatch) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
        model = self.spec.bind(params)
        token_ids, segment_ids = jnp.asarray(batch.token_ids), jnp.asarray(batch.segment_ids)
        hidden = model(
            token_ids,
            jnp.asarray(batch.positions),
            segment_ids,
            jnp.asarray(batch.prefix_ids),
            dtype=self._dtype,
            is_rematerialised=self.config.is_rematerialised,
        )
        return token_logprobs(model.logits(hidden), token_ids, segment_ids, self._temperature)

    def _loss(
        self, params: Params, batch: TrajectoryBatch, denominator: Float[Array, ""], reference: Params | None
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        config = self.config
        logprobs, entropy = self._logprobs(params, batch)
        loss_mask, segment_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids)
        inputs = LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=jnp.asarray(batch.behaviour_logprobs),
            proximal_logprobs=jax.lax.stop_gradient(logprobs),  # one update per batch: the policy at the start of the step is π
            advantages=jnp.asarray(batch.advantages),
            loss_mask=loss_mask,
            token_weights=token_weights(loss_mask, segment_ids, config.normalisation),
            segment_ids=segment_ids,
        )
        parts = [config.loss.loss(inputs)]
        if config.entropy_coefficient:
            parts.append(entropy_bonus(entropy, inputs, config.entropy_coefficient))
        if reference is not None:
            parts.append(kl_penalty(inputs, self._logprobs(reference, batch)[0], config.kl))
        metrics = policy_diagnostics(inputs, entropy, jnp.asarray(batch.staleness))
        for part in parts:
            metrics |= part.metrics
        return sum(part.loss_sum for part in parts) / denominator, metrics

    def _microbatch_sums(self, params: Params, batch: TrajectoryBatch, denominator: Float[Array, ""], reference: Params | None) -> StepSums:
        (loss, metrics), grads = jax.value_and_grad(self._loss, has_aux=True)(params, batch, denominator, reference)
        return StepSums(grads, loss, metrics)

    def _apply(self, state: TrainState, sums: StepSums) -> tuple[TrainState, dict[str, Array]]:
        grad_norm = optax.tree.norm(sums.grads)
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
        learning_rate = self._learning_rate(state.step)
        updates, opt_state = self._optimizer.update(sums.grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = {
            **sums.metrics,
            "loss": sums.loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "is_skipped": 1.0 - is_finite,
        }
        return TrainState(params, opt_state, state.step + 1), metrics


def _add_sums(sums: StepSums, new: StepSums) -> StepSums:
    metrics = {
        name: jnp.maximum(value, new.metrics[name]) if name.startswith("max/") else value + new.metrics[name]
        for name, value in sums.metrics.items()
    }
    return StepSums(jax.tree.map(jnp.add, sums.grads, new.grads), sums.loss + new.loss, metrics)
