"""Tasks from Hugging Face data sets."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl_jax.data.sources import DataError, RowList, Source, fingerprint_of, rows_from_records


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
        """Downloads the split, or takes it from the cache; the first row is row 1.

        Raises:
            ModuleNotFoundError: the datasets package is missing.
            DataError: the data set cannot be loaded, or a row cannot be used.
        """
        try:
            import datasets
            from datasets.exceptions import DatasetsError
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Hub data sets need the datasets package; run `pip install 'llamarl_jax[hub]'`") from error
        try:
            table = datasets.load_dataset(self.name, self.subset, split=self.split)
        except (OSError, ValueError, DatasetsError) as error:
            raise DataError(
                f"data set {self.name!r} (subset {self.subset!r}, split {self.split!r}) cannot be loaded: {error}; check the names and the "
                "network, or give the rows as a file with JsonlPrompts"
            ) from error
        rows = rows_from_records(enumerate(table, 1), f"{self.name}:{self.split}", self.question_column, self.reference_column)  # pyright: ignore[reportArgumentType]
        return RowList(rows, fingerprint_of(table._fingerprint, self))  # pyright: ignore[reportAttributeAccessIssue]
