"""Where tasks come from: files, Hub data sets, and procedural tasks, all with random access.

A source's config is a frozen dataclass; `open()` gives a `Source` of rows that any index can be asked for, so that shuffling,
sharding and resuming are questions of indices only. A bad row is reported with its file, row and column.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task before it is rendered: question, gold answer as text, and what a reward function may need besides."""

    question: str
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Rows by index; `fingerprint` changes when the rows may have."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class DataError(ValueError):
    """A data file or row cannot be used; the message names it and the fix."""


@dataclass(frozen=True)
class RowList:
    """A source whose rows are all in memory."""

    rows: Sequence[Row]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


@dataclass(frozen=True, kw_only=True)
class JsonlPrompts:
    """Rows of a JSON Lines file."""

    path: str
    """File ending in .jsonl or .jsonl.gz."""
    question_column: str = "question"
    """Column with the task's text."""
    reference_column: str | None = "answer"
    """Column with the gold answer; None where the reward needs none."""

    def open(self) -> Source:
        """Reads and checks the whole file."""
        path = _existing(self.path)
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        records = [_parse(line, path, number) for number, line in enumerate(text.decode("utf-8").splitlines(), 1) if line.strip()]
        return _rows(records, path, self.question_column, self.reference_column, hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, kw_only=True)
class ParquetPrompts:
    """Rows of a Parquet file."""

    path: str
    """Parquet file."""
    question_column: str = "question"
    """Column with the task's text."""
    reference_column: str | None = "answer"
    """Column with the gold answer; None where the reward needs none."""

    def open(self) -> Source:
        """Reads and checks the whole file."""
        import pyarrow.parquet

        path = _existing(self.path)
        records = pyarrow.parquet.read_table(path).to_pylist()
        return _rows(records, path, self.question_column, self.reference_column, hashlib.sha256(path.read_bytes()).hexdigest())


@dataclass(frozen=True, kw_only=True)
class HubPrompts:
    """Rows of a Hugging Face data set (needs the `hub` extra and a reachable Hub or a filled cache)."""

    name: str
    """Data set id such as `openai/gsm8k`."""
    subset: str | None = None
    """Configuration of the data set, such as `main`."""
    split: str = "train"
    """Split."""
    question_column: str = "question"
    """Column with the task's text."""
    reference_column: str | None = "answer"
    """Column with the gold answer; None where the reward needs none."""

    def open(self) -> Source:
        """Downloads the split, or takes it from the cache."""
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Hub data sets need the datasets package; run `pip install 'llamarl_jax[hub]'`") from error
        try:
            table = datasets.load_dataset(self.name, self.subset, split=self.split)
        except (OSError, ValueError) as error:
            raise DataError(
                f"data set {self.name!r} (subset {self.subset!r}, split {self.split!r}) cannot be loaded: {error}; check the names and the "
                "network, or give the rows as a file with JsonlPrompts"
            ) from error
        where = Path(f"{self.name}:{self.split}")
        return _rows(list(table), where, self.question_column, self.reference_column, str(table._fingerprint))  # noqa: SLF001


def overlap(first: Source, second: Source) -> int:
    """Counts the questions of `second` that also stand in `first`."""
    known = {first[i].question for i in range(len(first))}
    return sum(second[i].question in known for i in range(len(second)))


def fingerprint_of(value: Any) -> str:
    """Returns a short hash of a config's representation."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _existing(path_text: str) -> Path:
    path = Path(path_text)
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist; check the path (it is relative to the folder you start from)")
    return path


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error.msg}): {line[:80]!r}; mend or remove the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}; each line must be {{column: value, ...}}")
    return record


def _rows(
    records: Sequence[Mapping[str, Any]], path: Path, question_column: str, reference_column: str | None, fingerprint: str
) -> RowList:
    if not records:
        raise DataError(f"{path} has no rows; give a file with at least one task")
    rows = []
    for number, record in enumerate(records, 1):
        question = _text(record, question_column, path, number)
        reference = None if reference_column is None else _text(record, reference_column, path, number)
        used = {question_column, reference_column}
        rows.append(Row(question=question, reference=reference, metadata={k: v for k, v in record.items() if k not in used}))
    return RowList(rows, fingerprint)


def _text(record: Mapping[str, Any], column: str, path: Path, number: int) -> str:
    if column not in record:
        raise DataError(f"{path}, row {number} has no column {column!r}, only {sorted(record)}; set question_column / reference_column to these")
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise DataError(f"{path}, row {number}, column {column!r} holds {value!r}; it must be text or a number: fill it in or remove the row")
    return str(value)
