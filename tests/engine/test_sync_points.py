"""A step waits for the device once, where it says so: nothing else in engine/ may read a tensor's
values on the host."""

import re
from pathlib import Path

import pytest

import engine

READS = re.compile(
    r"\.(item|cpu|tolist|nonzero|numpy|synchronize)\(|\bnonzero\(|\.to\(\s*[\"']cpu[\"']"
)
MARKED = re.compile(r"#.*\b(sync point|host memory)\b")
EXEMPT = {
    "kv_copier.py": "waits for its own copies, on its own thread, beside the step",
    "weights.py": "reads files, before the first step",
    "prepare.py": "converts models, in a process of its own",
    "model_cache.py": "converts models, in a process of its own",
    "gguf_convert.py": "converts models, in a process of its own",
    "gguf_file.py": "converts models, in a process of its own",
    "gguf_tokenizer.py": "converts models, in a process of its own",
}
FOLDER = Path(engine.__file__).parent


def unmarked_reads(source: str) -> list[str]:
    return [line for line in source.splitlines() if READS.search(line) and not MARKED.search(line)]


DEVICE_FILES = [*FOLDER.glob("*.py"), *(FOLDER / "cuda").glob("*.py")]


@pytest.mark.parametrize("path", sorted(DEVICE_FILES), ids=lambda path: path.name)
def test_device_results_are_read_only_where_marked(path: Path) -> None:
    if path.name not in EXEMPT:
        assert unmarked_reads(path.read_text()) == []


def test_a_step_has_one_sync_point() -> None:
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    marked = {name: source.count("# sync point") for name, source in sources.items()}
    assert marked["model_runner.py"] == 1
    assert set(EXEMPT) <= set(sources), "an exempted file is gone"


def test_the_rule_finds_what_it_forbids() -> None:
    assert unmarked_reads("x = y.item()\nz = a.tolist()  # sync point\nb.numpy()")
    assert not unmarked_reads("z = a.tolist()  # sync point\nb.numpy()  # host memory")
