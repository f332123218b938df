"""Lists the `raise` statements of the package that no test executes.

`launch/test.sh` runs the whole suite under coverage and then `python -m tests.structure.raises` on the data of all threads and processes.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
DATA_FILE = ROOT / "build" / "coverage" / "data"
"""Where `coverage combine` leaves the data; the same as in pyproject.toml."""


def raises(source: str) -> Iterator[ast.Raise]:
    """Yields every raise statement, bare ones included."""
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))


def read_lines(data_file: Path) -> dict[Path, set[int]]:
    """Returns the executed lines of each measured file.

    Raises:
        FileNotFoundError: there are no combined data.
    """
    if not data_file.is_file():
        raise FileNotFoundError(f"{data_file} does not exist; run `coverage run -m pytest` and `coverage combine` before")
    data = coverage.CoverageData(basename=str(data_file))
    data.read()
    return {Path(name): set(data.lines(name) or ()) for name in data.measured_files()}


def unexecuted(package: Path, lines: Mapping[Path, set[int]]) -> list[str]:
    """Returns `file:line: statement` for each raise of the package that was never executed; in a file without data that is every one."""
    return [
        f"{path.relative_to(package.parent)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(package.rglob("*.py"))
        for node in sorted(raises(path.read_text(encoding="utf-8")), key=lambda node: node.lineno)
        if node.lineno not in lines.get(path, set())
    ]


def main() -> None:
    """Prints what is missing and ends with status 1 if anything is."""
    missing = unexecuted(ROOT / "llamarl_jax", read_lines(DATA_FILE))
    if missing:
        sys.exit("\n".join([*missing, f"no test executes these {len(missing)} raises; write one for each, with `match=` on its message"]))


if __name__ == "__main__":
    main()
