import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llamarl_jax.data.procedural import ArithmeticPrompts, DigitPrompts, ReasoningGymPrompts
from llamarl_jax.data.sources import DataError, HubPrompts, JsonlPrompts, ParquetPrompts, overlap

ROWS = [{"q": "1+1?", "a": "2", "level": 3}, {"q": "2+2?", "a": 4, "level": 1}]
SHARED = Path(__file__).parents[3] / "shared" / "data"


def _write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_jsonl_gzip_and_parquet_give_the_same_rows(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    plain = JsonlPrompts(path=_write(tmp_path / "x.jsonl", lines), question_column="q", reference_column="a").open()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    zipped = JsonlPrompts(path=str(tmp_path / "x.jsonl.gz"), question_column="q", reference_column="a").open()
    table = pyarrow.Table.from_pylist([{**row, "a": str(row["a"])} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    parquet = ParquetPrompts(path=str(tmp_path / "x.parquet"), question_column="q", reference_column="a").open()
    for source in (plain, zipped, parquet):
        assert [(r.question, r.reference, r.metadata) for r in (source[0], source[1])] == [("1+1?", "2", {"level": 3}), ("2+2?", "4", {"level": 1})]
        assert len(source) == 2


def test_a_changed_file_has_another_fingerprint(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    config = JsonlPrompts(path=_write(tmp_path / "x.jsonl", lines), question_column="q", reference_column=None)
    before = config.open().fingerprint
    assert config.open().fingerprint == before
    _write(tmp_path / "x.jsonl", lines[:1])
    assert config.open().fingerprint != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"q": "x"}', r"row 2 has no column 'a', only \['q'\]"),
        ('{"q": "", "a": "1"}', "row 2, column 'q' holds ''"),
        ('{"q": "x", "a": null}', "row 2, column 'a' holds None"),
        ('{"q": "x", "a": ["1"]}', r"row 2, column 'a' holds \['1'\]"),
        ('{"q": "x", ', "line 2 is not JSON"),
        ("[1, 2]", "line 2 is not a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_column(tmp_path, line, message):
    path = _write(tmp_path / "bad.jsonl", [json.dumps(ROWS[0]), line])
    with pytest.raises(DataError, match=message) as caught:
        JsonlPrompts(path=path, question_column="q", reference_column="a").open()
    assert "bad.jsonl" in str(caught.value)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data file nowhere.jsonl does not exist"):
        JsonlPrompts(path="nowhere.jsonl").open()
    with pytest.raises(DataError, match="has no rows"):
        JsonlPrompts(path=_write(tmp_path / "empty.jsonl", [""])).open()


def test_hub_errors_say_what_to_do(monkeypatch):
    import datasets

    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="data set 'openai/gsm8k' .* cannot be loaded: no route"):
        HubPrompts(name="openai/gsm8k", subset="main").open()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="need the datasets package"):
        HubPrompts(name="openai/gsm8k").open()


def test_arithmetic_holds_problems_out_for_real():
    train = ArithmeticPrompts(max_operand=20, operators="+-*").open()
    held_out = ArithmeticPrompts(max_operand=20, operators="+-*", split="eval").open()
    assert len(train) + len(held_out) == 3 * 21 * 21
    assert overlap(train, held_out) == 0
    assert overlap(train, train) == len(train)
    for source in (train, held_out):
        for i in range(len(source)):
            row = source[i]
            assert eval(row.question) == int(row.reference or "")  # noqa: S307
    assert ArithmeticPrompts(max_operand=20, operators="+-*").open().fingerprint == train.fingerprint != held_out.fingerprint


def test_arithmetic_errors():
    with pytest.raises(DataError, match=r"operators '\+/' has \['/'\]"):
        ArithmeticPrompts(operators="+/").open()
    with pytest.raises(DataError, match="min_operand = 5 must not exceed max_operand = 3"):
        ArithmeticPrompts(min_operand=5, max_operand=3).open()
    with pytest.raises(DataError, match="split 'eval' of 1 problems is empty"):
        ArithmeticPrompts(max_operand=0, split="eval").open()


@pytest.mark.parametrize(("kind", "answers"), [("copy", "{0}"), ("reverse", "{1}"), ("successor", "{2}")])
def test_digit_tasks(kind, answers):
    train, held_out = (DigitPrompts(kind=kind, num_digits=2, split=split).open() for split in ("train", "eval"))
    assert (len(train), len(held_out), overlap(train, held_out)) == (75, 25, 0)
    for i in range(len(train)):
        digits = train[i].question.rstrip("=")
        successor = "".join("1234567890"[int(d)] for d in digits)
        assert train[i].reference == answers.format(digits, digits[::-1], successor)
    with pytest.raises(DataError, match="num_digits is 9"):
        DigitPrompts(num_digits=9).open()


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "simple_equations", "letter_counting"])
def test_reasoning_gym_train_and_eval_items_are_disjoint_and_repeatable(task):
    train = ReasoningGymPrompts(task=task, size=50, seed=1).open()
    held_out = ReasoningGymPrompts(task=task, size=50, seed=0, split="eval").open()
    assert [train[i].question for i in range(5)] == [train[i].question for i in range(5)]
    # The items come from disjoint seeds; close training seeds share all but one item, which is the trap.
    neighbour = ReasoningGymPrompts(task=task, size=50, seed=2).open()
    assert neighbour[0].question == train[1].question
    assert overlap(train, held_out) <= 5  # chance repeats of short questions only
    assert train[0].metadata["task"] == task
    assert train[0].metadata["entry"]["answer"] == train[0].reference


def test_reasoning_gym_errors():
    with pytest.raises(DataError, match="reasoning-gym task 'no_such_task' with options"):
        ReasoningGymPrompts(task="no_such_task").open()
    with pytest.raises(DataError, match="'wrong_option': 3"):
        ReasoningGymPrompts(task="chain_sum", options=(("wrong_option", 3),)).open()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is missing")
def test_real_gsm8k():
    source = JsonlPrompts(path=str(SHARED / "gsm8k_train.jsonl.gz")).open()
    assert len(source) == 7473
    assert "####" in (source[7472].reference or "")
