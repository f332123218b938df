import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.data.files import JsonlPrompts, ParquetPrompts
from llamarl_jax.data.sources import DataError, Source

ROWS = [{"q": "1+1?", "a": "2", "level": 3}, {"q": "2+2?", "a": 4, "level": 1}]
SHARED = Path(__file__).parents[3] / "shared" / "data"


def _write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _contents(source: Source) -> list[tuple]:
    return [(source[i].question, source[i].reference, source[i].metadata) for i in range(len(source))]


def test_jsonl_gzip_and_parquet_give_the_same_rows(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    plain = JsonlPrompts(path=_write(tmp_path / "x.jsonl", lines), question_column="q", reference_column="a").open()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    zipped = JsonlPrompts(path=str(tmp_path / "x.jsonl.gz"), question_column="q", reference_column="a").open()
    table = pyarrow.Table.from_pylist([{**row, "a": str(row["a"])} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    parquet = ParquetPrompts(path=str(tmp_path / "x.parquet"), question_column="q", reference_column="a").open()
    for source in (plain, zipped, parquet):
        assert _contents(source) == [("1+1?", "2", {"level": 3}), ("2+2?", "4", {"level": 1})]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_any_text_comes_back_also_with_unusual_line_separators(tmp_path_factory, questions):
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    path.write_bytes("\r\n".join(json.dumps({"question": q}, ensure_ascii=False) for q in questions).encode("utf-8", "surrogatepass"))
    source = JsonlPrompts(path=str(path), reference_column=None).open()
    assert [source[i].question for i in range(len(source))] == questions


def test_the_line_and_paragraph_separators_of_unicode_do_not_end_a_line(tmp_path):
    line = '{"question": "a\u2028b\u2029c\x85d", "answer": "1"}'
    assert JsonlPrompts(path=_write(tmp_path / "x.jsonl", ["\ufeff" + line])).open()[0].question == "a\u2028b\u2029c\x85d"


def test_the_fingerprint_changes_with_the_data_and_the_columns_but_not_with_the_place(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    config = JsonlPrompts(path=_write(tmp_path / "x.jsonl", lines), question_column="q", reference_column=None)
    before = config.open().fingerprint
    assert config.open().fingerprint == before
    moved = JsonlPrompts(path=_write(tmp_path / "y.jsonl", lines), question_column="q", reference_column=None)
    assert moved.open().fingerprint == before
    assert JsonlPrompts(path=config.path, question_column="q", reference_column="a").open().fingerprint != before
    _write(tmp_path / "x.jsonl", lines[:1])
    assert config.open().fingerprint != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"q": "x"}', r"row 4 has no column 'a', only \['q'\]; set question_column"),
        ('{"q": "", "a": "1"}', "row 4, column 'q' holds ''"),
        ('{"q": " \\n", "a": "1"}', r"row 4, column 'q' holds ' \\n'"),
        ('{"q": "x", "a": null}', "row 4, column 'a' holds None"),
        ('{"q": "x", "a": NaN}', "row 4, column 'a' holds nan"),
        ('{"q": "x", "a": true}', "row 4, column 'a' holds True"),
        ('{"q": "x", "a": ["1"]}', r"row 4, column 'a' holds \['1'\]"),
        ('{"q": "x", ', "line 4 is not JSON"),
        ("[1, 2]", "line 4 is not a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_column(tmp_path, line, message):
    path = _write(tmp_path / "bad.jsonl", [json.dumps(ROWS[0]), "", "", line])  # empty lines count
    with pytest.raises(DataError, match=message) as caught:
        JsonlPrompts(path=path, question_column="q", reference_column="a").open()
    assert "bad.jsonl" in str(caught.value)


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"question": "x", "answer": "1"}, {"question": "y", "answer": None}]), tmp_path / "b.parquet"
    )
    with pytest.raises(DataError, match=r"b.parquet, row 2, column 'answer' holds None"):
        ParquetPrompts(path=str(tmp_path / "b.parquet")).open()


def test_missing_empty_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data file nowhere.jsonl does not exist"):
        JsonlPrompts(path="nowhere.jsonl").open()
    with pytest.raises(DataError, match="has no rows"):
        JsonlPrompts(path=_write(tmp_path / "empty.jsonl", [""])).open()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-10])
    with pytest.raises(DataError, match=r"cut\.jsonl.gz is not gzipped UTF-8 text"):
        JsonlPrompts(path=str(tmp_path / "cut.jsonl.gz")).open()
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl is not UTF-8 text"):
        JsonlPrompts(path=str(tmp_path / "latin.jsonl")).open()
    with pytest.raises(DataError, match=r"latin\.jsonl is not a Parquet file that can be read"):
        ParquetPrompts(path=str(tmp_path / "latin.jsonl")).open()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is missing")
def test_real_gsm8k():
    source = JsonlPrompts(path=str(SHARED / "gsm8k_train.jsonl.gz")).open()
    assert len(source) == 7473
    assert "####" in (source[7472].reference or "")
