import contextlib
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from llamarl_jax import cli
from llamarl_jax.config_files import ConfigError
from llamarl_jax.engine.sampling import SamplingConfig


def _run(argv, capsys):
    """Runs the command line; returns (status, stdout, stderr)."""
    status = 0
    try:
        cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def replace_train(monkeypatch):
    def replace(function):
        monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(function, "replaced by the test"))

    return replace


def test_help_lists_the_subcommands(capsys):
    status, out, _ = _run(["--help"], capsys)
    assert status == 0
    for name in ("train", "evaluate", "fetch", "generate", "export"):
        assert f"  {name} " in out
    assert max(map(len, out.splitlines())) <= 130


def test_no_arguments_print_the_help_and_fail(capsys):
    status, out, _ = _run([], capsys)
    assert status == 2
    assert "usage: llamarl" in out


def test_a_wrong_subcommand_suggests_the_nearest(capsys):
    status, _, err = _run(["trian", "x.py"], capsys)
    assert status == 2
    assert "llamarl has no subcommand 'trian'; did you mean 'train'?" in err


@pytest.mark.parametrize("name", ["fetch", "generate", "export"])
def test_help_of_each_subcommand(name, capsys):
    status, out, _ = _run([name, "--help"], capsys)
    assert status == 0
    assert f"llamarl {name}" in out


def test_help_is_quick_because_jax_is_not_imported():
    code = "import sys, llamarl_jax.cli; print([name for name in ('jax', 'transformers', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_runs_the_same_command():
    done = subprocess.run([sys.executable, "-m", "llamarl_jax", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"


def _raise_from_package(error_type, message):
    """Raises the error from a frame that belongs to the package, as its own code would."""
    code = compile("raise error_type(message)", "somewhere.py", "exec")
    exec(code, {"__name__": "llamarl_jax.somewhere", "error_type": error_type, "message": message})


@pytest.mark.parametrize("error_type", [ValueError, FileNotFoundError, ConfigError, ModuleNotFoundError])
def test_a_users_error_is_one_message_without_a_traceback(error_type, replace_train, capsys):
    replace_train(lambda argv: _raise_from_package(error_type, "batch of 100 does not divide; choose 96"))
    status, _, err = _run(["train", "x.py"], capsys)
    assert status == 2
    assert err.startswith("error: batch of 100 does not divide; choose 96\n")
    assert "Traceback" not in err


def test_debug_shows_the_traceback(replace_train):
    replace_train(lambda argv: _raise_from_package(ValueError, "the cause"))
    with pytest.raises(ValueError, match="the cause"):
        cli.main(["--debug", "train", "x.py"])


@pytest.mark.parametrize("error", [ValueError("from a library"), RuntimeError("a bug")])
def test_an_unexpected_error_keeps_its_traceback(error, replace_train):
    def fail(argv):
        raise error  # this frame is not the package's

    replace_train(fail)
    with pytest.raises(type(error), match=str(error)):
        cli.main(["train", "x.py"])


def test_an_interrupt_is_no_crash(replace_train, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    replace_train(interrupt)
    status, _, err = _run(["train", "x.py"], capsys)
    assert (status, err) == (130, "interrupted\n")


@pytest.fixture
def children_hear_interrupts():
    """A process that a shell started in the background ignores SIGINT, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _children(pid):
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.slow
@pytest.mark.usefixtures("children_hear_interrupts")
def test_ctrl_c_ends_a_real_run_and_its_workers(tmp_path):
    """As a user's terminal does it, amid training: all threads wait for one another at that moment."""
    metrics, errors = tmp_path / "run" / "metrics.jsonl", tmp_path / "stderr.txt"
    config = Path(__file__).parents[1] / "configs" / "tiny_digits_cpu.py"
    options = ["--run-dir", str(tmp_path / "run"), "--schedule.num-steps", "100000", "--evaluation.num-prompts", "2"]
    command = [sys.executable, "-m", "llamarl_jax", "train", str(config), *options]
    with errors.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as process:
        while process.poll() is None and not (metrics.is_file() and "trainer/loss" in metrics.read_text()):
            time.sleep(0.1)
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        status = process.wait()
    assert status == 130
    assert errors.read_text().endswith("interrupted\n")
    assert "Traceback" not in errors.read_text()
    assert children
    for child in children:
        with contextlib.suppress(FileNotFoundError):
            assert "llamarl_jax.rewards.worker" not in Path(f"/proc/{child}/cmdline").read_text()


def test_a_wrong_option_suggests_the_nearest(capsys):
    status, _, err = _run(["generate", "model", "prompt", "--temperatur", "1"], capsys)
    assert status == 2
    assert "--temperature" in err


def test_generate_passes_its_options_on(monkeypatch, capsys):
    seen = {}

    def generate_text(**options):
        seen.update(options)
        return ["four", "vier"]

    monkeypatch.setitem(sys.modules, "llamarl_jax.generate", types.SimpleNamespace(generate_text=generate_text))
    status, out, _ = _run(["generate", "smollm2-135m", "2+2?", "--temperature", "0.5", "--num-samples", "2"], capsys)
    assert (status, out) == (0, "four\nvier\n")
    assert seen["prompt"] == "2+2?"
    assert seen["sampling"] == SamplingConfig(temperature=0.5)
    assert seen["num_samples"] == 2


def _summary(**changes):
    result = types.SimpleNamespace(version=0, accuracy=0.25, low=0.2, high=0.3, num_scored=256)
    values = {
        "run_dir": Path("runs/a"),
        "model_dir": Path("runs/a/model"),
        "plot": Path("runs/a/run.png"),
        "evaluations": (result, types.SimpleNamespace(**vars(result) | {"version": 40, "accuracy": 0.75})),
        "num_steps": 40,
        "wall_s": 61.2,
    }
    return types.SimpleNamespace(**values | changes)


def test_a_run_is_summed_up():
    text = cli.describe_run(_summary(), "configs/x.py")  # pyright: ignore[reportArgumentType]
    for part in ("25.0% of 256 held-out", "75.0% of 256 held-out", "runs/a/model", "runs/a/metrics.jsonl", "runs/a/run.png", "Try next"):
        assert part in text
    assert "picture" not in cli.describe_run(_summary(plot=None), "configs/x.py")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["train", "evaluate", "export"])
def test_the_config_file_comes_first(name, capsys):
    status, _, err = _run([name], capsys)
    assert status == 2
    assert "Give a config file" in err
    status, _, err = _run([name, "--seed", "1"], capsys)
    assert status == 2
    assert "'--seed' stands where the config file belongs; put the file first." in err


class _Stub(types.ModuleType):
    """A module that stands in for a heavy one and notes the calls of its only function."""

    def __init__(self, name, function_name, result):
        super().__init__(name)
        self.calls = []
        setattr(self, function_name, lambda *arguments: self.calls.append(arguments) or result)


@pytest.fixture
def stub(monkeypatch):
    def install(name, function_name, result=None):
        import llamarl_jax

        module = _Stub(f"llamarl_jax.{name}", function_name, result)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(llamarl_jax, name, module, raising=False)
        return module

    return install


CONFIG = str(next(iter(sorted((Path(__file__).parents[1] / "configs").glob("*.py"))), "configs/missing.py"))


def test_train_resumes_and_overrides(stub, capsys):
    module = stub("controller", "run", _summary())
    status, out, err = _run(["train", CONFIG, "--resume", "--seed", "7"], capsys)
    assert status == 0, err
    ((config,),) = module.calls
    assert config.should_resume
    assert config.seed == 7
    assert "Try next" in out


def test_evaluate_prints_the_accuracy(stub, capsys):
    stub("evaluate", "evaluate_config", _summary().evaluations[0])
    status, out, err = _run(["evaluate", CONFIG], capsys)
    assert status == 0, err
    assert "25.0% of 256 held-out problems right" in out


def test_export_takes_a_folder_and_overrides(stub, capsys):
    module = stub("export", "export_checkpoint", Path("out"))
    status, out, err = _run(["export", CONFIG, "out", "--run-dir", "runs/b"], capsys)
    assert (status, out) == (0, "out\n"), err
    ((config, folder),) = module.calls
    assert (config.run_dir, folder) == ("runs/b", Path("out"))


def test_fetch_prints_the_folder(stub, capsys):
    module = stub("fetch", "fetch", Path("folder"))
    assert _run(["fetch", "smollm2-135m"], capsys)[:2] == (0, "folder\n")
    assert module.calls == [("smollm2-135m",)]


@pytest.mark.parametrize("name", ["train", "evaluate", "export"])
def test_help_of_a_config_lists_its_fields(name, capsys):
    argv = [name, CONFIG, "out", "--help"] if name == "export" else [name, CONFIG, "--help"]
    status, out, _ = _run(argv, capsys)
    assert status == 0
    if name != "export":
        assert "--schedule.max-staleness" in out
