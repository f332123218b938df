import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.bench.distance import divergence, summarise


def _distance(trainer_logits, decoder_logits):
    """Distance over all distributions [B, T, V]; the tokens' own log-probs are left at 0."""
    result = jax.device_get(jax.jit(divergence)(jnp.asarray(trainer_logits, jnp.float32), jnp.asarray(decoder_logits, jnp.float32)))
    return summarise(np.zeros(result.kl.size), *(x.reshape(-1) for x in result))


def _log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_two_tokens_worked_out_by_hand():
    """π = (1/2, 1/2), μ = (3/4, 1/4): Σ π²/μ = 1/3 + 1 = 4/3. At the second place π = μ."""
    pi, mu = np.array([[[0.5, 0.5], [0.2, 0.8]]]), np.array([[[0.75, 0.25], [0.2, 0.8]]])
    first = _distance(np.log(pi[:, :1]), np.log(mu[:, :1]))
    assert first.kl == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5), rel=1e-6)
    assert first.effective_sample_size == pytest.approx(3 / 4, rel=1e-6)
    assert first.greedy_agreement == 1  # a tie goes to the first token
    both = _distance(np.log(pi), np.log(mu))
    assert both.kl == pytest.approx(first.kl / 2, rel=1e-6)
    assert both.effective_sample_size == pytest.approx(1 / ((4 / 3 + 1) / 2), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 5.0])
def test_any_two_distributions_as_in_float64(scale):
    """The smallest scale gives KLs around 1e-7, where log μ − log π summed in float32 has no right digit."""
    random = np.random.default_rng(0)
    decoder = (3 * random.normal(size=(2, 3, 40))).astype(np.float32)
    trainer = (decoder + scale * random.normal(size=decoder.shape)).astype(np.float32)
    log_pi, log_mu = _log_softmax(trainer), _log_softmax(decoder)
    measured = _distance(trainer, decoder)
    assert measured.kl == pytest.approx(np.mean(np.sum(np.exp(log_mu) * (log_mu - log_pi), axis=-1)), rel=1e-2 if scale < 0.01 else 1e-4)
    mean_square = np.mean(np.sum(np.exp(2 * log_pi - log_mu), axis=-1))
    assert 1 - measured.effective_sample_size == pytest.approx(1 - 1 / mean_square, rel=1e-2 if scale < 0.01 else 1e-4)
    assert measured.greedy_agreement == np.mean(trainer.argmax(axis=-1) == decoder.argmax(axis=-1))


def test_sampling_estimates_the_same():
    random = np.random.default_rng(1)
    decoder = random.normal(size=(1, 4, 6))
    trainer = decoder + 0.5 * random.normal(size=decoder.shape)
    log_pi, log_mu = _log_softmax(trainer)[0], _log_softmax(decoder)[0]
    places = random.integers(4, size=400_000)
    tokens = (random.random(len(places))[:, None] > np.exp(log_mu).cumsum(axis=-1)[places, :-1]).sum(axis=-1)
    log_ratio = (log_pi - log_mu)[places, tokens]
    ratio = np.exp(log_ratio)
    measured = _distance(trainer, decoder)
    assert measured.kl == pytest.approx(-log_ratio.mean(), rel=0.03)
    assert measured.effective_sample_size == pytest.approx(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum()), rel=0.01)
    assert measured.effective_sample_size < 0.9


def test_equal_distributions_have_no_distance():
    logits = np.random.default_rng(0).normal(size=(2, 3, 7))
    logits[..., -2:] = -1e30  # ids that the tokenizer does not know
    measured = _distance(logits, logits)
    assert (measured.kl, measured.effective_sample_size, measured.greedy_agreement) == (0, 1, 1)


@pytest.mark.parametrize("impossible", [-200.0, -1e30, -np.inf])
def test_what_one_side_all_but_excludes_neither_overflows_nor_gives_nan(impossible):
    likely = [[[0.0, 0.0, -1e30]]]
    excluded = [[[0.0, impossible, -1e30]]]
    too_rare = _distance(likely, excluded)  # π/μ beyond the largest float32
    assert too_rare.effective_sample_size == pytest.approx(0, abs=1e-30)
    assert too_rare.kl == pytest.approx(np.log(2), rel=1e-6)
    too_common = _distance(excluded, likely)  # each sampled token that π excludes has the ratio 0
    assert too_common.effective_sample_size == pytest.approx(0.5, rel=1e-6)
    assert 90 < too_common.kl < np.inf


def test_tokens_count_alike():
    measured = summarise(np.array([0.5, -1.5, 0.0]), np.array([0.3, 0.0, 0.0]), np.log([1.0, 2.0, 3.0]), np.array([True, False, True]))
    assert (measured.logprob_abs_mean, measured.logprob_abs_max) == (pytest.approx(2 / 3), 1.5)
    assert measured.kl == pytest.approx(0.1)
    assert measured.effective_sample_size == pytest.approx(1 / (1 + 2))
    assert measured.greedy_agreement == pytest.approx(2 / 3)
