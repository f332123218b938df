import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from llamarl_jax import cli
from llamarl_jax.bench import decode, peers
from llamarl_jax.bench.decode import OurDecoder, bench_decode
from llamarl_jax.bench.limits import DeviceLimits
from llamarl_jax.bench.options import DecodeOptions
from llamarl_jax.bench.sample import Sample
from llamarl_jax.bench.workload import make_prompts, open_workload
from llamarl_jax.engine.api import Prefilled, PrefillRequest
from llamarl_jax.models.transformer import Params
from tests.bench.command_line import run_to_exit

SMALL: dict[str, Any] = {
    "model": "tiny",
    "batches": (1, 2),
    "prompt_tokens": 8,
    "new_tokens": 6,
    "decode_steps_per_call": 2,
    "repeats": 2,
    "limits_mib": 1,
    "max_disturbance": 1.0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path_factory.mktemp("models")))


def test_the_command_measures_and_saves(tmp_path, capsys):
    words = "bench decode --model tiny --batches 1 2 --prompt-tokens 8 --new-tokens 6 --decode-steps-per-call 2 --repeats 2"
    options = ["--limits-mib", "1", "--max-disturbance", "1", "--profile", "--output-dir", str(tmp_path / "results")]
    cli.main([*words.split(), *options])
    out = capsys.readouterr().out
    (path,) = (tmp_path / "results").glob("*-decode-tiny-float32-*.json")
    assert f"saved {path}" in out.replace("\n", "")
    result = json.loads(path.read_text())
    assert [(row["runner"], row["batch"], len(row["repeats"])) for row in result["rows"]] == [("llamarl_jax", 1, 2), ("llamarl_jax", 2, 2)]
    for row in result["rows"]:
        assert row["median"]["decode_tokens_per_s"] > 0
        assert 0 < row["median"]["prefill_s"] < row["median"]["total_s"]
        assert row["share_of_limit"] > 0
        assert row["tokens_equal_to_ours"] == 1
        for name, best in result["limits"].items():
            assert 0 < row["repeats"][0]["limits"][name] <= best
    assert result["least_work_of_a_step"]["2"]["cache_bytes"] == 2 * result["least_work_of_a_step"]["1"]["cache_bytes"]
    assert set(result["profiles"]) == {"1", "2"}
    assert result["settings"]["seed"] == 0
    assert {"hardware", "versions", "limits"} <= result.keys()
    assert str(tmp_path) not in path.read_text()


def test_timing_starts_no_compilation():
    options = DecodeOptions(**SMALL)
    workload = open_workload(options)
    ours, prompts = OurDecoder(workload, 2, options), make_prompts(workload.config, 2, 8, seed=0)
    ours.run(prompts, 6)
    before = ours.engine.num_compilations()
    sample = ours.run(prompts, 6)
    assert ours.engine.num_compilations() == before
    assert 0 < sample.prefill_s < sample.total_s
    assert 0 < sample.step_s <= sample.decode_s / 4  # two of three calls are no shorter than the median, and have two steps each
    assert [len(ids) for ids in sample.token_ids] == [6, 6]


def _note_prefills(ours: OurDecoder, monkeypatch: pytest.MonkeyPatch) -> list[PrefillRequest]:
    """Returns the prompts that are prefilled from now on."""
    seen, prefill = [], ours.engine.prefill

    def noted(params: Params, wanted: Sequence[PrefillRequest]) -> Iterator[Prefilled]:
        seen.extend(wanted)
        return prefill(params, wanted)

    monkeypatch.setattr(ours.engine, "prefill", noted)
    return seen


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_samples_of_a_prompt_share_its_prefill_and_change_no_token(kernels, monkeypatch):
    results = []
    for slots_per_prompt in (1, 2):
        options = DecodeOptions(**{**SMALL, "kernels": kernels}, samples_per_prompt=4, slots_per_prompt=slots_per_prompt)
        workload = open_workload(options)
        ours = OurDecoder(workload, 6, options)
        prefilled = _note_prefills(ours, monkeypatch)
        results.append(ours.run(make_prompts(workload.config, 6, 8, seed=0, samples=4), 6).token_ids)
        assert len(prefilled) == 2
        assert ours.engine.num_prompt_rows == 6 // slots_per_prompt
    assert results[0] == results[1]
    assert results[0][0] == results[0][3] != results[0][4]


def test_calls_ahead_change_no_token_and_a_small_cache_is_counted_as_such(tmp_path):
    results = {}
    for name, changes in {"plain": {}, "ahead": {"dispatch_ahead": 1}, "int8": {"kv_dtype": "int8"}}.items():
        options = DecodeOptions(**SMALL, **changes, output_dir=tmp_path)
        workload = open_workload(options)
        ours = OurDecoder(workload, 2, options)
        results[name] = ours.run(make_prompts(workload.config, 2, 8, seed=0), 6).token_ids
        if name == "int8":
            assert ours.engine.init_decode_state().cache[0].keys.dtype == "int8"
    assert results["plain"] == results["ahead"]
    report = json.loads(bench_decode(DecodeOptions(**SMALL, kv_dtype="int8", dispatch_ahead=1, output_dir=tmp_path)).read_text())
    whole = json.loads(bench_decode(DecodeOptions(**SMALL, output_dir=tmp_path)).read_text())
    sizes = [result["least_work_of_a_step"]["2"]["cache_bytes"] for result in (report, whole)]
    head_dim = open_workload(DecodeOptions(**SMALL)).config.head_dim
    assert sizes[0] / sizes[1] == pytest.approx((1 + 4 / head_dim) / 4)
    assert (report["settings"]["kv_dtype"], report["settings"]["dispatch_ahead"]) == ("int8", 1)


class _Fake:
    """A peer that is always right, twice as long, and gives up at the second batch."""

    name, version, pid = "fake", "9", os.getpid()

    def __init__(self):
        self.log = []

    def run(self, prompts, new_tokens):
        self.log.append(len(prompts))
        if len(prompts) == 2:
            raise peers.PeerError("out of breath")
        return Sample(total_s=3.0, prefill_s=1.0, decode_steps=5, step_s=0.4, token_ids=[[0] * new_tokens for _ in prompts])


def test_peers_run_by_turns_and_a_failing_one_is_left_out(tmp_path, monkeypatch, capsys):
    fake = _Fake()
    monkeypatch.setattr(decode, "open_peers", lambda folder, stack: ([fake], {"absent": "not installed"}))
    path = bench_decode(DecodeOptions(**SMALL, peers=True, output_dir=tmp_path))
    assert fake.log == [1, 1, 1, 2]  # a warm-up and two runs, then one failure
    result = json.loads(path.read_text())
    ours, theirs, _ = result["rows"]
    assert theirs["ours_over_this"] == pytest.approx(ours["median"]["decode_tokens_per_s"] / 2.5)
    assert theirs["share_of_limit"] is None
    assert {repeat["limits"] for repeat in theirs["repeats"]} == {None}
    assert result["left_out"] == {"absent": "not installed", "fake": "batch 2: out of breath"}
    assert result["versions"]["fake"] == "9"
    assert "absent left out: not installed" in capsys.readouterr().out


def test_a_run_that_is_repeated_is_compared_with_the_rates_beside_the_repeat(tmp_path, monkeypatch):
    rates = itertools.count(1)
    monkeypatch.setattr(decode, "measure_limits", lambda dtype, num_bytes: DeviceLimits(*[next(rates)] * 3))
    monkeypatch.setattr(decode, "undisturbed", lambda run, pids, max_share, say: (run(), run(), 0.0)[1:])
    path = bench_decode(DecodeOptions(**{**SMALL, "batches": (1,), "repeats": 1}, output_dir=tmp_path))
    assert json.loads(path.read_text())["rows"][0]["repeats"][0]["limits"]["read_bytes_per_s"] == 4  # the second try's second measurement


def test_a_second_run_of_a_day_keeps_the_first(tmp_path):
    options = DecodeOptions(**{**SMALL, "batches": (1,), "repeats": 1}, output_dir=tmp_path)
    first, second = bench_decode(options), bench_decode(options)
    assert first.exists()
    assert second.name == first.name.replace(".json", "-2.json")


def test_peers_need_a_folder(tmp_path, monkeypatch):
    from llamarl_jax.bench.workload import SHAPES

    monkeypatch.setitem(SHAPES, "small", open_workload(DecodeOptions(**SMALL)).config)
    with pytest.raises(ValueError, match="is a shape with random weights; give --model a folder"):
        bench_decode(DecodeOptions(**{**SMALL, "model": "small"}, peers=True, output_dir=tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "bench decode has no batches; give at least one"),
        ({"batches": (4, 0)}, "bench decode: batches has 0; it must be at least 1"),
        ({"repeats": 0}, "bench decode: repeats has 0; it must be at least 1"),
        ({"samples_per_prompt": 0}, "bench decode: samples_per_prompt has 0; it must be at least 1"),
        ({"new_tokens": 1}, "bench decode: new_tokens is 1; it must be at least 2"),
        ({"profile": True, "new_tokens": 9}, "set --new-tokens to at least 16"),
        ({"dispatch_ahead": -1}, "bench decode: dispatch_ahead is -1; choose 0"),
        ({"profile": True, "dispatch_ahead": 1}, "but dispatch_ahead is 1, so that others are on their way; set --dispatch-ahead 0"),
    ],
)
def test_options_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        DecodeOptions(**changes)


def test_help(capsys):
    status, out, _ = run_to_exit(["bench", "decode", "--help"], capsys)
    assert status == 0
    for option in ("--model", "--batches", "--prompt-tokens", "--new-tokens", "--dtype", "--repeats", "--peers", "--output-dir"):
        assert option in out
    cli.main(["bench", "--help"])
    assert "  decode    tokens per second" in capsys.readouterr().out


def test_wrong_names_suggest_the_nearest(capsys):
    status, _, err = run_to_exit(["bench", "decde"], capsys)
    assert status == 2
    assert "llamarl bench has no benchmark 'decde'; did you mean 'decode'?" in err
    status, _, err = run_to_exit(["bench", "decode", "--batchs", "1"], capsys)
    assert status == 2
    assert "--batches" in err
    assert run_to_exit(["bench"], capsys)[0] == 2


def test_a_wrong_value_is_one_message(capsys):
    status, _, err = run_to_exit(["bench", "decode", "--batches", "0"], capsys)
    assert status == 2
    assert "batches has 0" in err
    assert "Traceback" not in err


def test_help_needs_no_jax():
    code = "import sys, llamarl_jax.bench.options; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
