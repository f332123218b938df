"""Every error message of the package is matched by a test.

The literal parts of the message of each `raise` are cut into pieces of eight characters; one piece must occur in a `match=` pattern of some
test.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIECE = 8


def _literal_parts(node: ast.AST) -> list[str]:
    """Returns the constant strings of a message, through f-strings, `+` and conditional expressions."""
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in _literal_parts(value)]
    if isinstance(node, ast.BinOp):
        return _literal_parts(node.left) + _literal_parts(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []


def _pieces(text: str) -> set[str]:
    return {text[i : i + PIECE] for i in range(len(text) - PIECE + 1)}


def _raises(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the line and the literal parts of each `raise Error("...")` that could be matched."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            parts = _literal_parts(node.exc.args[0])
            if any(len(part) >= PIECE for part in parts):
                yield node.lineno, parts


def _patterns(source: str) -> Iterator[str]:
    """Yields the strings of a test that may be a pattern: those inside `match=` and those in parametrize tables."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= PIECE:
            yield re.sub(r"\\(.)", r"\1", node.value)


def _uncovered(sources: dict[str, str], test_sources: list[str]) -> list[str]:
    known: set[str] = set()
    for source in test_sources:
        if "match=" in source:
            for pattern in _patterns(source):
                known |= _pieces(pattern)
    return [
        f"{name}:{line}: {''.join(parts)[:90]}"
        for name, source in sources.items()
        for line, parts in _raises(source)
        if not any(_pieces(part) & known for part in parts)
    ]


def test_every_raise_has_a_test():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "llamarl_jax").rglob("*.py"))}
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    uncovered = _uncovered(sources, tests)
    assert not uncovered, "no test matches the message of:\n" + "\n".join(uncovered)


def test_the_check_itself():
    source = 'def f(x):\n    raise ValueError(f"batch of {x} trajectories cannot be split; " "choose another")\n'
    assert _uncovered({"a.py": source}, ['pytest.raises(ValueError, match=r"batch of 3 trajectories cannot")']) == []
    assert _uncovered({"a.py": source}, ['pytest.raises(ValueError, match="something else entirely")']) == [
        "a.py:2: batch of  trajectories cannot be split; choose another"
    ]
