import pytest

from llamarl_jax.rewards.api import RewardConfig, RewardTerm
from tests.rewards import hostile

TERM = RewardTerm(name="a", function=hostile.length)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terms": ()}, r"rewards.terms has the names \[\]; give at least one term"),
        ({"terms": (TERM, TERM)}, r"rewards.terms has the names \['a', 'a'\]"),
        ({"terms": (RewardTerm(name="a", function=3),)}, "reward term 'a' has the function 3, which cannot be called"),  # pyright: ignore[reportArgumentType]
        ({"terms": (RewardTerm(name="a", function=hostile.length, weight=float("nan")),)}, "reward term 'a' has the weight nan"),
        ({"num_workers": 0}, "rewards.num_workers = 0 must be at least 1"),
        ({"timeout_s": 0.0}, "rewards.timeout_s = 0.0 and rewards.start_timeout_s = 120.0 must be above 0"),
        ({"start_timeout_s": float("nan")}, "rewards.start_timeout_s = nan must be above 0"),
        ({"max_failure_share": 1.5}, "rewards.max_failure_share = 1.5 must lie between 0 and 1"),
    ],
)
def test_a_bad_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**{"terms": (TERM,), **changes})
