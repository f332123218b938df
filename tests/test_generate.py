import pytest

from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.generate import generate_text
from llamarl_jax.models.tiny import CHARACTERS, write_tiny_model


def test_the_number_of_answers_is_checked_before_the_model_is_looked_for():
    with pytest.raises(ValueError, match="num_samples is 0; it must be at least 1"):
        generate_text("no-such-model", "2+2=", num_samples=0)


def test_answers_follow_the_seed_and_keep_to_their_budget(tmp_path):
    write_tiny_model(tmp_path)
    options = {"max_new_tokens": 6, "sampling": SamplingConfig(temperature=1.0), "num_samples": 3, "is_raw": True}
    first, other = (generate_text(str(tmp_path), "2+2=", seed=seed, **options) for seed in (0, 1))
    assert len(first) == len(other) == 3
    assert len({*first, *other}) == 6  # by chance with probability near 1: 6 tokens of 49
    for text in first + other:
        assert len(text) <= 6
        assert set(text) <= set(CHARACTERS)
