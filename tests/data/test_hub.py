import sys

import pytest

from llamarl_jax.data.hub import HubPrompts
from llamarl_jax.data.sources import DataError

datasets = pytest.importorskip("datasets")


def _instead_of_the_hub(monkeypatch, answer) -> None:
    def load(name, subset, *, split):
        assert (name, subset, split) == ("openai/gsm8k", "main", "train")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load)


def test_rows_of_a_data_set(monkeypatch):
    table = datasets.Dataset.from_list([{"q": "1+1", "a": 2, "level": 1}, {"q": "2+2", "a": 4, "level": 3}])
    _instead_of_the_hub(monkeypatch, table)
    source = HubPrompts(name="openai/gsm8k", subset="main", question_column="q", reference_column="a").open()
    assert [(source[i].question, source[i].reference, source[i].metadata) for i in range(2)] == [
        ("1+1", "2", {"level": 1}),
        ("2+2", "4", {"level": 3}),
    ]
    other = HubPrompts(name="openai/gsm8k", subset="main", question_column="q", reference_column="level").open()
    assert source.fingerprint != other.fingerprint
    with pytest.raises(DataError, match=r"openai/gsm8k:train, row 1 has no column 'question', only \['a', 'level', 'q'\]"):
        HubPrompts(name="openai/gsm8k", subset="main").open()


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), ValueError("no route"), datasets.exceptions.DatasetGenerationError("no route")]
)
def test_what_cannot_be_loaded_says_what_to_do(monkeypatch, error):
    _instead_of_the_hub(monkeypatch, error)
    with pytest.raises(
        DataError, match=r"data set 'openai/gsm8k' \(subset 'main', split 'train'\) cannot be loaded: no route; check the names"
    ):
        HubPrompts(name="openai/gsm8k", subset="main").open()


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"need the datasets package; run `pip install 'llamarl_jax\[hub\]'`"):
        HubPrompts(name="openai/gsm8k").open()
