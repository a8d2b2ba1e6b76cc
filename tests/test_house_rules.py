"""Rules of the house that no linter knows: small files, small functions, honest names.

Each rule is a pure check over one parsed file; generated stubs are not ours.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "router", "prefill_server", "decode_server", "kvfabric", "engine",
    "runtime", "protos", "deploy", "bench", "tests",
)  # fmt: skip

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
BANNED_IMPORTS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
MAY_READ_ENVIRONMENT = (
    "runtime/flags.py", "deploy/", "kvfabric/ucx.py", "engine/model_cache.py", "bench/", "tests/",
)  # fmt: skip
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X")


def sources() -> list[str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if "_pb2" not in path.name)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all modules imported anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def reads_environment(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        for node in ast.walk(tree)
    ) or any(
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in ("environ", "environb", "getenv") for alias in node.names)
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("source", sources())
def test_house_rules(source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    tree = ast.parse(text, source)
    assert Path(source).stem not in BANNED_NAMES
    assert text.count("\n") <= MAX_FILE_LINES
    for function in functions(tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"
    assert not BANNED_IMPORTS & set(imported(tree))
    assert not [word for word in UNFINISHED if word in text]
    if not source.startswith(MAY_READ_ENVIRONMENT):
        assert not reads_environment(tree), "only flags read the environment"
    if text and not source.startswith("tests/"):
        assert ast.get_docstring(tree), "a module says what it is for"


def test_the_rules_see_the_code() -> None:
    assert len(sources()) > 20
    bad = ast.parse("def f():\n import pickle\n from marshal import loads\n os.environ['X']\n")
    assert set(imported(bad)) == {"pickle", "marshal"}
    assert reads_environment(bad)
    assert reads_environment(ast.parse("from os import getenv"))
    assert not reads_environment(ast.parse("environ = {}\nprint(environ)"))
