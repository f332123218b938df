import json
import math
import sys
import types

import numpy as np
import pytest

from llamarl_jax.metrics.writer import FILE_NAME, MetricsConfig, MetricsWriter, read_metrics

PLAIN = MetricsConfig()


def test_rows_come_back_as_they_were_written(tmp_path):
    with MetricsWriter(tmp_path / "run", PLAIN) as writer:
        writer.write(0, {"loss": 0.5, "reward": np.float32(0.25)})
        writer.write(1, {"loss": 0.1})
    assert read_metrics(tmp_path / "run") == [{"step": 0, "loss": 0.5, "reward": 0.25}, {"step": 1, "loss": 0.1}]


def test_each_row_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, PLAIN)
    writer.write(0, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 1
    writer.close()


def test_nonfinite_values_are_valid_json_and_restored(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0})

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
    assert line == {"step": 0, "a": None, "b": None, "c": None, "d": 2.0, "nonfinite": {"a": "nan", "b": "inf", "c": "-inf"}}
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 2.0)
    assert "nonfinite" not in row


def test_resume_drops_the_rows_that_will_be_done_again(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        for step in range(5):
            writer.write(step, {"loss": float(step), "odd": math.nan})
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"step": 5, "lo')  # the run was killed here
    with MetricsWriter(tmp_path, PLAIN, first_step=3) as writer:
        writer.write(3, {"loss": 30.0})
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert math.isnan(rows[2]["odd"])


def test_resume_before_the_first_row_starts_empty(tmp_path):
    with MetricsWriter(tmp_path, PLAIN, first_step=0) as writer:
        writer.write(0, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 1


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.write(0, {"loss": 1.0})
    with pytest.raises(FileExistsError, match="already holds the metrics of a run; resume it"):
        MetricsWriter(tmp_path, PLAIN)


def test_an_evaluation_may_lag_behind_training(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.write(4, {"loss": 1.0})
        writer.write(3, {"eval/accuracy": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path)] == [4, 3]


def test_a_value_that_is_no_number_names_its_metric(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer, pytest.raises(TypeError, match=r"metric 'loss' is .* metrics are single numbers"):
        writer.write(0, {"loss": [1.0, 2.0]})  # pyright: ignore[reportArgumentType]


def test_read_metrics_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the folder of a run that wrote at least one step"):
        read_metrics(tmp_path)
    (tmp_path / FILE_NAME).write_text('garbage\n{"step": 0}\n')
    with pytest.raises(ValueError, match="line 1 is not a metrics row: 'garbage'"):
        read_metrics(tmp_path)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    config = MetricsConfig(use_tensorboard=True)
    with MetricsWriter(tmp_path, config) as writer:
        writer.write(0, {"loss": 0.5})
    with MetricsWriter(tmp_path, config, first_step=1) as writer:
        writer.write(1, {"loss": 0.25})
    seen = {}
    starts = []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        for event in loader.LegacyEventFileLoader(str(file)).Load():
            seen.update({(event.step, value.tag): value.simple_value for value in event.summary.value})
            if event.HasField("session_log"):
                starts.append(event.step)
    assert seen == {(0, "loss"): 0.5, (1, "loss"): 0.25}
    assert starts == [1]  # what an earlier file says from step 1 on is hidden


def test_wandb_run_is_continued(tmp_path, monkeypatch):
    logged, opened = [], []

    def init(**options):
        opened.append(options)
        return types.SimpleNamespace(
            id="abc", log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("finish")
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = MetricsConfig(use_wandb=True, wandb_project="p")
    with MetricsWriter(tmp_path, config, run_config={"seed": 1}) as writer:
        writer.write(0, {"loss": 0.5})
    MetricsWriter(tmp_path, config, first_step=1).close()
    assert logged == [(0, {"loss": 0.5}), "finish", "finish"]
    assert [options["id"] for options in opened] == [None, "abc"]
    assert opened[0]["config"] == {"seed": 1}
    assert opened[0]["project"] == "p"


@pytest.mark.parametrize(
    ("module", "config", "message"),
    [
        (
            "tensorboard.compat.proto.event_pb2",
            MetricsConfig(use_tensorboard=True),
            "the tensorboard package is not installed; run `pip install",
        ),
        ("wandb", MetricsConfig(use_wandb=True), "the wandb package is not installed; run `pip install"),
    ],
)
def test_a_missing_package_is_named_and_no_row_is_lost(tmp_path, monkeypatch, module, config, message):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.write(0, {"loss": 1.0})
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=message):
        MetricsWriter(tmp_path, config, first_step=0)
    assert len(read_metrics(tmp_path)) == 1
