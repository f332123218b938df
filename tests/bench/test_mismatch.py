import json
import subprocess
import sys

import numpy as np
import pytest

from llamarl_jax import cli
from llamarl_jax.bench.mismatch import bench_mismatch, cache_token_bytes, make_batch
from llamarl_jax.bench.mismatch_options import MismatchOptions
from llamarl_jax.policy import open_policy
from tests.bench.command_line import run_to_exit


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path_factory.mktemp("models")))


def test_the_command_prints_and_saves(tmp_path, capsys):
    words = "bench mismatch --model tiny --modes none w8a8 --kv-dtypes same int8 --num-prompts 3 --new-tokens 8"
    cli.main([*words.split(), "--output-dir", str(tmp_path / "results")])
    out = capsys.readouterr().out
    (path,) = (tmp_path / "results").glob("*-mismatch-tiny-float32-*.json")
    assert f"saved {path}" in out.replace("\n", "")
    result = json.loads(path.read_text())
    rows = {(row["mode"], row["kv_dtype"]): row for row in result["rows"]}
    assert list(rows) == [("none", "same"), ("none", "int8"), ("w8a8", "same"), ("w8a8", "int8")]
    assert "…" not in out  # nothing is cut off at 80 columns
    assert all(f" {mode}" in out and f" {kv_dtype} " in out for mode, kv_dtype in rows)
    assert rows["none", "same"]["logprob_abs_max"] < 1e-5
    assert result["engine_record"]["logprob_abs_max"] < 1e-5
    for variant in list(rows)[1:]:
        assert 1e-5 < rows[variant]["logprob_abs_mean"] < rows[variant]["logprob_abs_max"] < 1
        assert 0 < rows[variant]["kl"] < 0.1
        assert 0.9 < rows[variant]["effective_sample_size"] < 1
        assert 0.5 < rows[variant]["greedy_agreement"] <= 1
    assert rows["w8a8", "int8"]["weight_bytes"] < 0.5 * rows["none", "int8"]["weight_bytes"]
    assert 3 <= result["batch"]["completion_tokens"] <= 24
    assert result["settings"]["seed"] == 0
    assert result["settings"]["prompts"] == "built in"
    assert {"started", "hardware", "versions", "weights"} <= result.keys()
    assert str(tmp_path) not in path.read_text()


def test_one_seed_is_one_batch():
    policy = open_policy("tiny")
    first, again, other = (make_batch(policy, MismatchOptions(model="tiny", num_prompts=3, new_tokens=8, seed=s)) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_the_cache_of_a_token():
    config = open_policy("tiny").config
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    scales = 2 * config.num_layers * config.num_kv_heads
    assert cache_token_bytes(config, "float32") == 4 * values
    assert cache_token_bytes(config, "bfloat16") == 2 * values
    assert cache_token_bytes(config, "int8") == cache_token_bytes(config, "float8_e4m3fn") == values + 4 * scales


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "1+2="}\n{"text": "copy this long one"}\n{"text": "7-3="}\n')
    options = MismatchOptions(
        model="tiny", prompts=path, question_column="text", num_prompts=2, max_prompt_tokens=8, new_tokens=4, modes=("none",),
        kv_dtypes=("same",), output_dir=tmp_path,
    )  # fmt: skip
    batch = make_batch(policy := open_policy("tiny"), options)
    starts = [row[:4] for row in batch.token_ids]
    assert [policy.tokenizer.decode(ids) for ids in starts] == ["1+2=", "7-3="]
    result = json.loads(bench_mismatch(options).read_text())
    assert result["settings"]["prompts"] == "prompts.jsonl"
    assert result["batch"]["fingerprint"] == batch.fingerprint


def test_too_few_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "1+2="}\n{"question": "copy this long one"}\n')
    options = MismatchOptions(model="tiny", prompts=path, num_prompts=2, max_prompt_tokens=8, output_dir=tmp_path)
    with pytest.raises(ValueError, match="1 of the 2 prompts have at most 8 tokens, but num_prompts is 2; lower --num-prompts"):
        bench_mismatch(options)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        bench_mismatch(MismatchOptions(model="tiny", prompts=tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ()}, "bench mismatch has no modes; give at least one, for instance --modes none w8a8"),
        ({"kv_dtypes": ()}, "bench mismatch has no kv_dtypes; give at least one"),
        ({"modes": ("none", "w8a8", "none")}, "bench mismatch: modes has none more than once; name each once"),
        ({"num_prompts": 0}, "bench mismatch: num_prompts is 0; it must be at least 1"),
        ({"new_tokens": 0}, "bench mismatch: new_tokens is 0; it must be at least 1"),
        ({"max_prompt_tokens": -1}, "bench mismatch: max_prompt_tokens is -1; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        MismatchOptions(**changes)


def test_help(capsys):
    status, out, _ = run_to_exit(["bench", "mismatch", "--help"], capsys)
    assert status == 0
    for option in ("--model", "--modes", "--kv-dtypes", "--dtype", "--prompts", "--new-tokens", "--seed", "--output-dir"):
        assert option in out
    cli.main(["bench", "--help"])
    assert "  mismatch  distance between trainer and decoder" in capsys.readouterr().out


def test_wrong_words_are_named(capsys):
    status, _, err = run_to_exit(["bench", "mismtach"], capsys)
    assert status == 2
    assert "did you mean 'mismatch'?" in err
    status, _, err = run_to_exit(["bench", "mismatch", "--modes", "w4"], capsys)
    assert status == 2
    assert "w4" in err
    status, _, err = run_to_exit(["bench", "mismatch", "--new-tokens", "0"], capsys)
    assert status == 2
    assert "new_tokens is 0" in err
    assert "Traceback" not in err


def test_help_needs_no_jax():
    code = "import sys, llamarl_jax.bench.mismatch_options; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
