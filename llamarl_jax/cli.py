"""The `llamarl` command: train, evaluate, fetch, generate, export, bench.

Each subcommand parses its arguments and calls one function of the package. What is heavy (JAX, the model) is imported inside the
subcommand, so that `--help` and a mistyped name answer at once.

An error that this package raises on purpose (its own ValueError, FileNotFoundError, …) is the user's to fix: the message goes to
stderr without a traceback and the exit status is 2; `--debug` shows the traceback. Any other error keeps its traceback.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import tyro

from llamarl_jax.config_files import load_config, nearest, override

if TYPE_CHECKING:
    from llamarl_jax.config import Config
    from llamarl_jax.controller import RunSummary
    from llamarl_jax.evaluate import EvaluationResult

USAGE_STATUS = 2
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells report it
_USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, ModuleNotFoundError, TypeError)


class Command(NamedTuple):
    """A subcommand: what it runs with the remaining arguments, and its line in the help text."""

    run: Callable[[list[str]], None]
    summary: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchArguments:
    """Download a model once and print the folder that holds it in Hugging Face form."""

    model: tyro.conf.Positional[str]
    """`smollm2-135m`, a Hub id such as `Qwen/Qwen3-0.6B`, or a local folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Answer a prompt with a model, to try it from the shell."""

    model: tyro.conf.Positional[str]
    """A model name or folder as for `llamarl fetch`."""
    prompt: tyro.conf.Positional[str]
    """The user's message; `-` reads it from standard input."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0 always takes the likeliest token."""
    top_k: int = 0
    """Sample from the k likeliest tokens only; 0 takes all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability."""
    num_samples: int = 1
    """How many answers to sample."""
    seed: int = 0
    """Seed of the sampling."""
    is_raw: bool = False
    """Pass the prompt as it is, without the model's chat template."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write the newest checkpoint of a run as a folder that transformers loads."""

    output_dir: tyro.conf.Positional[Path]
    """Folder to write; must not exist yet."""


def train(argv: list[str]) -> None:
    """Trains as a config file says and prints what came of it."""
    config = _config_from("train", ["--should-resume" if argument == "--resume" else argument for argument in argv])
    from llamarl_jax import controller

    print(describe_run(controller.run(config), argv[0]))


def evaluate(argv: list[str]) -> None:
    """Measures a config's model on its held-out problems and prints the accuracy."""
    config = _config_from("evaluate", argv)
    from llamarl_jax.evaluate import evaluate_config

    print(f"{config.model}: {describe_evaluation(evaluate_config(config))}")


def fetch(argv: list[str]) -> None:
    """Fetches a model and prints its folder."""
    arguments = tyro.cli(FetchArguments, args=argv, prog="llamarl fetch")
    from llamarl_jax.fetch import fetch as fetch_model

    print(fetch_model(arguments.model))


def generate(argv: list[str]) -> None:
    """Prints a model's answers to a prompt."""
    arguments = tyro.cli(GenerateArguments, args=argv, prog="llamarl generate")
    from llamarl_jax.engine.sampling import SamplingConfig
    from llamarl_jax.generate import generate_text

    options = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    options["sampling"] = SamplingConfig(**{name: options.pop(name) for name in ("temperature", "top_k", "top_p", "min_p")})
    if arguments.prompt == "-":
        options["prompt"] = sys.stdin.read()
    for text in generate_text(**options):
        print(text)


def export(argv: list[str]) -> None:
    """Exports the newest checkpoint of a config's run."""
    config_path, options = _split_config("export", argv, "OUTPUT_DIR [--field value ...]")
    if config_path is None:
        options = ["--help"]
    arguments, overrides = tyro.cli(ExportArguments, args=options, prog="llamarl export CONFIG", return_unknown_args=True)
    config = _load("export", config_path, overrides)
    from llamarl_jax.export import export_checkpoint

    print(export_checkpoint(config, arguments.output_dir))


def bench(argv: list[str]) -> None:
    """Runs one benchmark and prints where its numbers are."""
    lines = [f"  {name:<{max(map(len, BENCHMARKS))}}  {command.summary}" for name, command in BENCHMARKS.items()]
    usage = "\n".join(["usage: llamarl bench NAME [--option value ...]", "", *lines, "", "`llamarl bench NAME --help` lists its options."])
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
    elif not argv or argv[0] not in BENCHMARKS:
        _exit_with(f"llamarl bench has no benchmark {argv[0]!r}{nearest(argv[0], BENCHMARKS)}\n\n{usage}" if argv else usage)
    else:
        BENCHMARKS[argv[0]].run(argv[1:])


def bench_decode(argv: list[str]) -> None:
    """Measures the decoder."""
    from llamarl_jax.bench.options import DecodeOptions

    options = tyro.cli(DecodeOptions, args=argv, prog="llamarl bench decode")
    from llamarl_jax.bench.decode import bench_decode as run

    print(f"saved {run(options)}")


def bench_mismatch(argv: list[str]) -> None:
    """Measures the distance between trainer and rounded decoders."""
    from llamarl_jax.bench.mismatch_options import MismatchOptions

    options = tyro.cli(MismatchOptions, args=argv, prog="llamarl bench mismatch")
    from llamarl_jax.bench.mismatch import bench_mismatch as run

    print(f"saved {run(options)}")


BENCHMARKS = {
    "decode": Command(bench_decode, "tokens per second of the decoder, next to what the hardware allows and to other libraries"),
    "mismatch": Command(bench_mismatch, "distance between trainer and decoder when its weights or its KV cache are rounded"),
}

COMMANDS = {
    "train": Command(train, "train a model by asynchronous RL:  llamarl train CONFIG [--resume] [--field value ...]"),
    "evaluate": Command(evaluate, "measure a model on held-out problems:  llamarl evaluate CONFIG [--field value ...]"),
    "fetch": Command(fetch, "download a model once:  llamarl fetch smollm2-135m"),
    "generate": Command(generate, "try a model from the shell:  llamarl generate MODEL PROMPT"),
    "export": Command(export, "write the newest checkpoint for transformers:  llamarl export CONFIG OUTPUT_DIR"),
    "bench": Command(bench, "measure the decoder:  llamarl bench decode|mismatch [--option value ...]"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the subcommand that the arguments name; ends the process with a status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        raise SystemExit(0 if arguments else USAGE_STATUS)
    if arguments[0] == "--version":
        from llamarl_jax import __version__

        print(__version__)
        raise SystemExit(0)
    name = arguments.pop(0)
    if name not in COMMANDS:
        _exit_with(f"llamarl has no subcommand {name!r}{nearest(name, COMMANDS)}\n\n{_usage()}")
    try:
        COMMANDS[name].run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED_STATUS) from None
    except _USER_ERRORS as error:
        if is_debug or not _is_raised_by_package(error.__traceback__):
            raise
        _exit_with(f"error: {error}\n(llamarl --debug {name} ... shows where)")


def describe_evaluation(result: EvaluationResult) -> str:
    """Says the accuracy with its interval and the number of problems."""
    return f"{result.accuracy:.1%} of {result.num_scored} held-out problems right (95 % interval {result.low:.1%} to {result.high:.1%})"


def describe_run(summary: RunSummary, config_path: str) -> str:
    """Says what a run achieved, where its results lie and what to try next."""
    lines = ["", f"{summary.num_steps} steps in {summary.wall_s:.0f} s"]
    lines += [f"  version {result.version:<5} {describe_evaluation(result)}" for result in summary.evaluations]
    lines += ["", f"  model    {summary.model_dir}  (a Hugging Face folder)", f"  metrics  {summary.run_dir / 'metrics.jsonl'}"]
    if summary.plot is not None:
        lines.append(f"  picture  {summary.plot}")
    lines += [
        "",
        "Try next:",
        f"  llamarl generate {summary.model_dir} 'What is 3 + 4?'",
        f"  llamarl train {config_path} --run-dir {summary.run_dir}-synchronous --schedule.max-staleness 0",
        f"  llamarl train {config_path} --help",
    ]
    return "\n".join(lines)


def _config_from(command: str, argv: list[str]) -> Config:
    path, overrides = _split_config(command, argv, "[--field value ...]")
    return _load(command, path, overrides)


def _split_config(command: str, argv: list[str], rest: str) -> tuple[str | None, list[str]]:
    """Splits off the config file, which comes first; None stands for a call for help without a file."""
    usage = f"usage: llamarl {command} CONFIG {rest}"
    if not argv:
        _exit_with(f"{usage}\nGive a config file, for instance one of configs/; `llamarl {command} --help` lists the fields.")
    if argv[0] in ("-h", "--help"):
        return None, ["--help"]
    if argv[0].startswith("-"):
        _exit_with(f"{usage}\n{argv[0]!r} stands where the config file belongs; put the file first.")
    return argv[0], argv[1:]


def _load(command: str, path: str | None, overrides: list[str]) -> Config:
    from llamarl_jax.config import Config  # here, to keep `llamarl --help` quick

    if path is None:
        return tyro.cli(Config, args=overrides, prog=f"llamarl {command} CONFIG", config=(tyro.conf.AvoidSubcommands,))
    return override(load_config(path, Config), overrides, prog=f"llamarl {command} {path}")


def _is_raised_by_package(trace: types.TracebackType | None) -> bool:
    """Tells whether the innermost frame is this package's, so that the message was written for the user."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "llamarl_jax"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: llamarl [--debug] SUBCOMMAND ...",
            "",
            "Reinforcement learning for language models in JAX, asynchronous on two device meshes.",
            "",
            *lines,
            "",
            "`llamarl SUBCOMMAND --help` lists what a subcommand takes; `llamarl train CONFIG --help` lists every field of the config.",
            "--debug shows the traceback of an error; --version prints the version.",
        ]
    )


def _exit_with(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(USAGE_STATUS)
