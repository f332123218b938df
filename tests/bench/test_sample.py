import pytest

from llamarl_jax.bench.sample import Row, Sample, agreement, find_row


def _sample(total_s, **changes):
    values = {"total_s": total_s, "prefill_s": 1.0, "decode_steps": 10, "step_s": 0.2, "token_ids": [[1, 2], [3, 4]], **changes}
    return Sample(**values)


def test_the_rate_is_of_the_decode_part():
    assert _sample(3.0).decode_tokens_per_s == 2 * 10 / 2.0


def test_a_row_gives_medians():
    row = Row(runner="x", batch=2, samples=(_sample(3.0), _sample(2.0), _sample(11.0)), agreement=1.0)
    assert row.median("total_s") == 3.0
    assert row.decode_tokens_per_s == 10.0
    assert find_row([row], "x", 2) is row
    assert find_row([row], "x", 3) is None


def test_agreement_counts_equal_tokens():
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75


def test_agreement_needs_as_many_tokens():
    with pytest.raises(ValueError, match="shorter"):
        agreement([[1, 2]], [[1]])
