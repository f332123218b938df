import pytest

from llamarl_jax.data.sources import DataError, Row, RowList, fingerprint_of, overlap, rows_from_records


def _source(*questions: str) -> RowList:
    return RowList([Row(question=question) for question in questions], "")


def test_overlap_counts_rows_of_the_second_source():
    assert overlap(_source("a", "b", "b"), _source("b", "c", "b", "B")) == 2
    assert overlap(_source("a"), _source("b")) == 0


def test_other_columns_become_metadata_and_numbers_text():
    rows = rows_from_records([(1, {"q": "x", "a": 1.5, "z": [1], "w": None})], "here", "q", "a")
    assert rows == [Row(question="x", reference="1.5", metadata={"z": [1], "w": None})]
    assert rows_from_records([(1, {"q": "x"})], "here", "q", None) == [Row(question="x")]


def test_no_rows():
    with pytest.raises(DataError, match="here has no rows; give one with at least one task"):
        rows_from_records([], "here", "q", None)


def test_a_fingerprint_is_short_stable_and_tells_values_apart():
    assert fingerprint_of("a", 1) == fingerprint_of("a", 1)
    assert len({fingerprint_of("a", 1), fingerprint_of("a", "1"), fingerprint_of("a1"), fingerprint_of(("a", 1))}) == 4
    assert len(fingerprint_of(0)) == 16
