"""Tasks from JSON Lines and Parquet files. A bad row is reported with its file, row and column."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl_jax.data.sources import DataError, RowList, Source, fingerprint_of, rows_from_records


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
        """Reads and checks the whole file; row numbers in messages are line numbers.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: the file or a row cannot be used.
        """
        path, data = _read(self.path)
        rows = rows_from_records(_json_lines(path, data), str(path), self.question_column, self.reference_column)
        return RowList(rows, _fingerprint(data, self.question_column, self.reference_column))


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
        """Reads and checks the whole file; the first row is row 1.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: the file or a row cannot be used.
        """
        import pyarrow
        import pyarrow.parquet

        path, data = _read(self.path)
        try:
            records = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a Parquet file that can be read ({error}); for JSON lines use JsonlPrompts") from error
        rows = rows_from_records(enumerate(records, 1), str(path), self.question_column, self.reference_column)
        return RowList(rows, _fingerprint(data, self.question_column, self.reference_column))


def _read(path_text: str) -> tuple[Path, bytes]:
    path = Path(path_text)
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist; check the path (it is relative to the folder you start from)")
    return path, path.read_bytes()


def _fingerprint(data: bytes, question_column: str, reference_column: str | None) -> str:
    return fingerprint_of(hashlib.sha256(data).hexdigest(), question_column, reference_column)


def _json_lines(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not {'gzipped ' if path.suffix == '.gz' else ''}UTF-8 text ({error}); is it whole?") from error
    # Not splitlines: a JSON string may hold U+2028 and other characters that it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _parse(line, path, number)


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error.msg}): {line[:80]!r}; mend or remove the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}; each line must be {{column: value, ...}}")
    return record
