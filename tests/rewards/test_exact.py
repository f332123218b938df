from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl_jax.data.files import JsonlPrompts
from llamarl_jax.rewards.api import RewardInput
from llamarl_jax.rewards.exact import DigitShare, ExactNumber, ExactText, Stopped, final_text, numbers_in

SHARED = Path(__file__).parents[3] / "shared" / "data"


def _sample(text: str, reference: str | None = "12", prompt: str = "", **others) -> RewardInput:
    return RewardInput(prompt_text=prompt, completion_text=text, reference=reference, **others)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", [12]),
        ("112", [112]),
        ("so it is 12.", [12]),
        ("1,200 and 1200.50", [1200, Decimal("1200.5")]),
        ("-3, +4, −5", [-3, 4, -5]),
        ("5-3=2", [5, 3, 2]),
        ("x=-3", [-3]),
        (".5 and 0.50", [Decimal("0.5")] * 2),
        ("\\boxed{12}", [12]),
        ("$12$ or 12% or 12€", [12, 12, 12]),
        ("a12 12b x_12 1e5 1.2.3 1,2", []),  # pieces of words, versions and lists without spaces are no numbers
        ("1/2", [None]),
        ("7 / 2 or 2^10 or 3/4.", [None, None, None]),
        ("12/day", [12]),
        ("1/2x", []),
        ("1,2000", []),
        ("007", [7]),
        ("no number", []),
    ],
)
def test_numbers_of_a_text(text, expected):
    assert numbers_in(text) == expected


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_a_number_equals_itself_however_it_is_written_and_no_other(number, other):
    for written in (f"{number}", f"{number:,}", f"{number}.0", f"First 3, then {number}.", f"**{number}**", f"= {number}\n"):
        assert ExactNumber()(_sample(written, reference=str(number))) == 1.0
        assert ExactNumber()(_sample(written, reference=str(other))) == float(number == other)
    assert ExactNumber()(_sample(f"1{abs(number)}", reference=str(abs(number)))) == 0.0


@given(st.text(alphabet="0123456789,./^-+ ex\n", max_size=40), st.text(max_size=40))
def test_any_text_is_scored_without_an_error(numeric, text):
    for answer in (numeric, text):
        assert ExactNumber()(_sample(answer)) in (0.0, 1.0)


def test_a_number_of_ten_thousand_digits_is_wrong_not_an_error():
    assert ExactNumber()(_sample("1" * 10_000)) == 0.0
    assert ExactNumber()(_sample("1" * 10_000, reference="1" * 10_000)) == 1.0


def test_first_or_last_number():
    assert [ExactNumber(which=which)(_sample("12 or 13")) for which in ("first", "last")] == [1.0, 0.0]
    assert ExactNumber()(_sample("12 = 24/2")) == 0.0  # the last number is the fraction


@pytest.mark.parametrize("reference", ["", None, "twelve", "12 or 13", "1/2"])
def test_a_reference_that_is_no_number_rewards_nothing(reference):
    with pytest.raises(ValueError, match=r"is not one number; choose another reward|has no reference; set reference_column"):
        ExactNumber()(_sample("12", reference=reference))


def test_the_gold_number_behind_a_marker():
    reward = ExactNumber(reference_marker="####")
    assert reward(_sample("It is 1200.", reference="3 * 400 = 1200\n#### 1,200")) == 1.0
    with pytest.raises(ValueError, match="reference '1,200' does not hold '####'"):
        reward(_sample("1200", reference="1,200"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is missing")
def test_every_reference_of_gsm8k_can_be_read_and_answers_itself():
    source = JsonlPrompts(path=str(SHARED / "gsm8k_test.jsonl")).open()
    reward = ExactNumber(reference_marker="####")
    rows = [source[i] for i in range(len(source))]
    assert all(reward(_sample(row.reference or "", reference=row.reference)) == 1.0 for row in rows)
    assert sum(reward(_sample("The answer is 7", reference=row.reference)) for row in rows) < 0.05 * len(rows)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "12", "12"),
        ("", "<think>13</think>12", "12"),
        ("", "<think>12", None),
        ("", "<think>1</think>12<think>13", None),
        ("", "<think>1</think>2<think>3</think>12", "12"),
        ("user: 5+7<think>\n", "it is 12", None),  # the template opened the thinking, the model never closed it
        ("user: 5+7<think>\n", "thus</think>12", "12"),
        ("<think>\n\n</think>\n\n", "12", "12"),  # the template switched thinking off
        ("Use <think> tags. ", "12", "12"),
    ],
)
def test_only_what_follows_the_thinking_counts(prompt, text, expected):
    sample = _sample(text, prompt=prompt)
    assert final_text(sample) == expected
    assert ExactNumber()(sample) == float(expected is not None)
    assert ExactText()(sample) == float(expected == "12")


def test_text_is_compared_up_to_white_space_around_it():
    assert [ExactText()(_sample(text, reference="a b")) for text in (" a b\n", "a  b", "A b", "")] == [1.0, 0.0, 0.0, 0.0]


@given(st.text("0123456789", min_size=1, max_size=8), st.text("0123456789 ", max_size=12))
def test_the_digit_share_is_1_for_the_reference_alone(reference, answer):
    share = DigitShare()(_sample(answer, reference=reference))
    assert 0.0 <= share <= 1.0
    assert (share == 1.0) == (answer == reference)
    assert DigitShare()(_sample(reference, reference=reference)) == 1.0


def test_digit_share_golden_values():
    cases = [("12", "12", 1.0), ("13", "12", 0.5), ("1", "12", 0.5), ("1234", "12", 0.5), ("", "12", 0.0), ("21", "12", 0.0)]
    assert [DigitShare()(_sample(text, reference)) for text, reference, _ in cases] == [expected for *_, expected in cases]
    with pytest.raises(ValueError, match="has no reference; set reference_column"):
        DigitShare()(_sample("1", reference=None))


def test_stopped():
    assert [Stopped()(_sample("", finish_reason=reason)) for reason in ("stop", "length", "aborted")] == [1.0, 0.0, 0.0]
