import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.data import procedural
from llamarl_jax.data.procedural import ArithmeticPrompts, DigitPrompts, Split
from llamarl_jax.data.sources import DataError, Source, overlap


def _questions(source: Source) -> list[str]:
    return [source[i].question for i in range(len(source))]


def test_arithmetic_answers_are_right_and_every_problem_is_in_one_split():
    train, held_out = (
        ArithmeticPrompts(max_operand=20, operators="+-*", text="{a}{operator}{b}", split=split).open() for split in ("train", "eval")
    )
    everything = {f"{a}{operator}{b}" for operator, a, b in itertools.product("+-*", range(21), range(21))}
    assert sorted(_questions(train) + _questions(held_out)) == sorted(everything)
    assert len(held_out) == round(len(everything) / 4)
    for source in (train, held_out):
        assert all(eval(source[i].question) == int(source[i].reference or "") for i in range(len(source)))


@settings(max_examples=40, deadline=None)
@given(
    low=st.integers(-5, 10),
    width=st.integers(2, 12),
    operators=st.sampled_from(["+", "-", "*", "+-", "*+-", "++"]),
    share=st.floats(0.1, 0.9),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_no_question_is_shared_whatever_the_options(low, width, operators, share, sizes, seeds):
    options = {"min_operand": low, "max_operand": low + width, "operators": operators, "eval_share": share}
    splits: tuple[Split, ...] = ("train", "eval")
    whole = {split: ArithmeticPrompts(**options, split=split).open() for split in splits}
    assert overlap(whole["train"], whole["eval"]) == 0
    for split, size, seed in zip(splits, sizes, seeds, strict=True):
        if size > len(whole[split]):
            continue
        config = ArithmeticPrompts(**options, split=split, size=size, seed=seed)
        part = config.open()
        assert _questions(part) == _questions(config.open())
        assert len(set(_questions(part))) == size
        assert set(_questions(part)) <= set(_questions(whole[split]))


def test_seed_and_size_choose_within_the_split():
    parts = [_questions(ArithmeticPrompts(size=20, seed=seed).open()) for seed in (0, 1)]
    assert parts[0] != parts[1]


def test_what_is_held_out_never_changes():
    """A changed order would let a resumed or repeated run train on what an earlier one was measured on."""
    assert _questions(ArithmeticPrompts(split="eval").open())[:5] == ["3 + 4", "0 + 9", "7 + 8", "1 + 8", "3 + 0"]
    assert _questions(DigitPrompts(split="eval").open())[:5] == ["86=", "31=", "52=", "22=", "85="]


def test_fingerprints_name_the_options():
    configs = [
        ArithmeticPrompts(),
        ArithmeticPrompts(split="eval"),
        ArithmeticPrompts(text="{a} + {b} ="),
        ArithmeticPrompts(size=3),
        DigitPrompts(),
    ]
    assert len({config.open().fingerprint for config in configs}) == len(configs)
    assert ArithmeticPrompts().open().fingerprint == ArithmeticPrompts().open().fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": "+/"}, r"operators '\+/' has \['/'\]"),
        ({"operators": ""}, r"operators '' has \[\]; choose one or more of \+ - \*"),
        ({"min_operand": 5, "max_operand": 3}, "min_operand = 5 must not exceed max_operand = 3"),
        ({"max_operand": 0, "split": "eval"}, "of 1 problems, 0 are held out: one split is empty"),
        ({"eval_share": 0.999}, "of 100 problems, 100 are held out"),
        ({"eval_share": 1.0}, "eval_share = 1.0 must lie between 0 and 1"),
        ({"max_operand": 99_999}, "there are 10,000,000,000 problems, more than 1,000,000"),
        ({"size": 76}, "size = 76, but the split has 75 problems; choose 1 to 75"),
        ({"size": 0}, "size = 0, but the split has 75 problems"),
        ({"text": "{a} + {c}"}, r"text '\{a\} \+ \{c\}' has the placeholders \['a', 'c'\]; it needs \['a', 'b'\]"),
        ({"text": "{a} + {b}", "operators": "+-"}, r"has the placeholders \['a', 'b'\]; it needs \['a', 'b', 'operator'\]"),
        ({"text": "{a}{b}", "max_operand": 11}, r"text '\{a\}\{b\}' writes the problems \('\+', 0, 1\) and|writes the problems .* alike"),
        ({"text": "{a} + {b"}, r"text = '\{a\} \+ \{b' has braces that do not match"),
    ],
)
def test_arithmetic_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticPrompts(**options).open()


def test_the_limit_of_problems_is_inclusive(monkeypatch):
    monkeypatch.setattr(procedural, "MAX_PROBLEMS", 100)
    assert len(ArithmeticPrompts().open()) == 75
    with pytest.raises(DataError, match="there are 121 problems, more than 100"):
        ArithmeticPrompts(max_operand=10).open()


@pytest.mark.parametrize(("kind", "answers"), [("copy", "{0}"), ("reverse", "{1}"), ("successor", "{2}")])
def test_digit_tasks(kind, answers):
    train, held_out = (DigitPrompts(kind=kind, num_digits=2, split=split).open() for split in ("train", "eval"))
    assert (len(train), len(held_out), overlap(train, held_out)) == (75, 25, 0)
    for i in range(len(train)):
        digits = train[i].question.rstrip("=")
        successor = "".join("1234567890"[int(d)] for d in digits)
        assert train[i].reference == answers.format(digits, digits[::-1], successor)


def test_digit_options_that_cannot_be():
    with pytest.raises(DataError, match="num_digits is 9"):
        DigitPrompts(num_digits=9).open()
    with pytest.raises(DataError, match=r"text 'x' has the placeholders \[\]; it needs \['digits'\]"):
        DigitPrompts(text="x").open()
    with pytest.raises(DataError, match="eval_share = 0 must lie between 0 and 1"):
        DigitPrompts(eval_share=0).open()
