"""AIPO against its formula on a policy small enough to enumerate, and hand-worked values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.losses.aipo import AipoConfig, aipo
from llamarl_jax.losses.inputs import LossInputs, LossOutput
from llamarl_jax.losses.logprobs import token_logprobs
from llamarl_jax.losses.policy_gradient import ReinforceConfig
from llamarl_jax.losses.ratios import importance_ratio
from tests.losses.batches import gradient, inputs_of, random_inputs

V, T = 3, 2
SEQUENCES = np.array(list(itertools.product(range(V), repeat=T)))  # all 9
ADVANTAGES = np.array([1.0, -0.5, 2.0, 0.3, -1.5, 0.0, 0.7, -2.0, 1.2])  # one per sequence
RHOS = [1.0, 2.0, 10.0, np.inf]


def random_tables(seed: int, scale: float) -> dict[str, np.ndarray]:
    """Logits of the first token [V], and of the second given the first [V, V]."""
    rng = np.random.default_rng(seed)
    return {"first": rng.normal(0, scale, V), "second": rng.normal(0, scale, (V, V))}


POLICY, BEHAVIOUR = random_tables(1, 1.0), random_tables(2, 2.5)


def softmax(x: np.ndarray) -> np.ndarray:
    mass = np.exp(x - x.max(-1, keepdims=True))
    return mass / mass.sum(-1, keepdims=True)


def token_probs(tables: dict[str, np.ndarray]) -> np.ndarray:
    """Probability of each token given those before it, [9, T]."""
    first, second = softmax(tables["first"]), softmax(tables["second"])
    return np.stack([first[SEQUENCES[:, 0]], second[SEQUENCES[:, 0], SEQUENCES[:, 1]]], axis=1)


def score_gradients(tables: dict[str, np.ndarray], y: np.ndarray) -> list[dict[str, np.ndarray]]:
    """∇log π of both tokens of a sequence, in closed form: indicator − softmax at the logits that were used."""
    first, second = softmax(tables["first"]), softmax(tables["second"])
    of_first = {"first": np.eye(V)[y[0]] - first, "second": np.zeros((V, V))}
    of_second = {"first": np.zeros(V), "second": np.zeros((V, V))}
    of_second["second"][y[0]] = np.eye(V)[y[1]] - second[y[0]]
    return [of_first, of_second]


def formula(rho: float, *, is_direct: bool = False) -> dict[str, np.ndarray]:
    """Σ_y μ(y) Σ_t min(π_t/μ_t, ρ) A(y) ∇log π_t, by loops; `is_direct`: the derivative of Σ_y μ(y) Σ_t min(π_t/μ_t, ρ) A(y) instead."""
    pi, mu = token_probs(POLICY), token_probs(BEHAVIOUR)
    total = {"first": np.zeros(V), "second": np.zeros((V, V))}
    for n, y in enumerate(SEQUENCES):
        for t, score in enumerate(score_gradients(POLICY, y)):
            ratio = pi[n, t] / mu[n, t]
            weight = (ratio if ratio <= rho else 0.0) if is_direct else min(ratio, rho)
            for name in total:
                total[name] += mu[n].prod() * weight * ADVANTAGES[n] * score[name]
    return total


def expected_loss_gradient(loss) -> dict[str, np.ndarray]:
    """Minus autodiff's gradient of the loss, each sequence weighted by its probability under μ; each row is a start token and two more."""
    mu = token_probs(BEHAVIOUR)

    def objective(tables):
        unused = jnp.zeros((len(SEQUENCES), 1, V))
        logits = [jnp.broadcast_to(tables["first"], (len(SEQUENCES), V))[:, None], tables["second"][SEQUENCES[:, 0]][:, None], unused]
        ids = jnp.asarray(np.pad(SEQUENCES, ((0, 0), (1, 0))))
        mask = jnp.ones(ids.shape).at[:, 0].set(0.0)
        logprobs, _ = token_logprobs(jnp.concatenate(logits, axis=1), ids, jnp.ones_like(ids), 1.0)
        inputs = LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=jnp.asarray(np.pad(np.log(mu), ((0, 0), (1, 0))), jnp.float32),
            proximal_logprobs=jax.lax.stop_gradient(logprobs),
            advantages=jnp.broadcast_to(jnp.asarray(ADVANTAGES, jnp.float32)[:, None], ids.shape),
            loss_mask=mask,
            token_weights=mask * jnp.asarray(mu.prod(axis=1), jnp.float32)[:, None],
            segment_ids=jnp.ones_like(ids),
        )
        return -loss(inputs).loss_sum

    return jax.grad(objective)(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), POLICY))


def direct_derivative(rho: float):
    """The wrong rule: the capped ratio is differentiated."""

    def loss(inputs: LossInputs) -> LossOutput:
        ratio = jnp.minimum(importance_ratio(inputs.logprobs, inputs.behaviour_logprobs), rho)
        return LossOutput(-jnp.sum(inputs.token_weights * ratio * inputs.advantages), {})

    return loss


def assert_close(actual, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6)


def finite_differences(objective) -> dict[str, np.ndarray]:
    """Central differences of a function of the policy's tables, in float64."""
    grads = {name: np.zeros_like(table) for name, table in POLICY.items()}
    for name, table in POLICY.items():
        for index in np.ndindex(table.shape):
            step = np.zeros_like(table)
            step[index] = 1e-5
            grads[name][index] = (objective({**POLICY, name: table + step}) - objective({**POLICY, name: table - step})) / 2e-5
    return grads


def test_the_example_has_ratios_on_both_sides_of_every_cap():
    ratio = token_probs(POLICY) / token_probs(BEHAVIOUR)
    assert ratio.min() < 1
    assert ratio.max() > 10
    assert np.any((ratio > 2) & (ratio < 10))


@pytest.mark.parametrize("rho", RHOS)
def test_gradient_equals_the_formula(rho):
    assert_close(expected_loss_gradient(AipoConfig(rho=rho).loss), formula(rho))


def test_without_a_cap_it_is_the_gradient_of_the_per_token_importance_sampled_objective():
    mu = token_probs(BEHAVIOUR)

    def objective(tables):
        return np.sum(mu.prod(axis=1) * ADVANTAGES * (token_probs(tables) / mu).sum(axis=1))

    assert_close(expected_loss_gradient(AipoConfig(rho=np.inf).loss), finite_differences(objective))


def test_with_prefixes_from_the_policy_it_is_the_policy_gradient():
    """At the last token, whose prefixes come from μ, swapping only μ(y_2 | y_1) for π must leave ∇ of E_{y_1 ~ μ, y_2 ~ π}[A]."""
    first = softmax(BEHAVIOUR["first"])[SEQUENCES[:, 0]]
    expected = finite_differences(lambda tables: np.sum(first * token_probs(tables)[:, 1] * ADVANTAGES))["second"]
    np.testing.assert_allclose(expected_loss_gradient(AipoConfig(rho=np.inf).loss)["second"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rho", [2.0, 10.0])
def test_differentiating_the_capped_ratio_is_another_rule(rho):
    direct = expected_loss_gradient(direct_derivative(rho))
    assert_close(direct, formula(rho, is_direct=True))  # the control is what the docstring says it is …
    assert max(np.abs(direct[name] - formula(rho)[name]).max() for name in direct) > 1e-2  # … and is not AIPO


def test_differentiating_the_capped_ratio_stops_capped_tokens():
    inputs = inputs_of([[-1.0, -1.0]], [[-4.0, -1.5]], advantages=[[-1.0, -1.0]])  # ratios e³ and √e
    np.testing.assert_allclose(gradient(direct_derivative(2.0), inputs), [[0, np.exp(0.5)]], rtol=1e-6)
    np.testing.assert_allclose(gradient(AipoConfig(rho=2.0).loss, inputs), [[2, np.exp(0.5)]], rtol=1e-6)


def test_hand_worked():
    ln2 = float(np.log(2))
    inputs = inputs_of(
        [[-1.0, -1.0, -1.0, -1.0]],
        [[-1.0, -1 - ln2, -1 - 3 * ln2, -1 + ln2]],  # ratios 1, 2, 8, 1/2
        advantages=[[1, 1, -3, 4]],
        weights=[[1, 1, 0.5, 1]],
    )
    output = aipo(inputs, 4.0)
    np.testing.assert_allclose(gradient(AipoConfig(rho=4.0).loss, inputs), [[-1, -2, 0.5 * 4 * 3, -0.5 * 4]], rtol=1e-6)
    assert float(output.loss_sum) == pytest.approx(1 + 2 - 6 + 2)  # −w · weight · A · log π with log π = −1
    assert float(output.metrics["sum/ratio/clipped_share"]) == 1


@pytest.mark.parametrize("rho", RHOS)
def test_on_policy_it_is_reinforce(rho):
    inputs = random_inputs(0, spread=0.0)
    np.testing.assert_array_equal(gradient(AipoConfig(rho=rho).loss, inputs), gradient(ReinforceConfig().loss, inputs))


def test_cap_is_checked():
    with pytest.raises(ValueError, match=r"rho = 0\.5 cuts even on-policy tokens"):
        AipoConfig(rho=0.5)
