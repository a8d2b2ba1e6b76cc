"""The cache of prepared models: whole or not at all, once, by one at a time."""

import os
import threading
from pathlib import Path

import pytest

from engine.model_cache import ModelCache, default_cache_root, is_intact


class Maker:
    """Writes two files and counts how often it is asked to."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, out: Path) -> None:
        assert not list(out.iterdir())
        self.times += 1
        (out / "config.json").write_text("{}")
        (out / "weights").mkdir()
        weights = out / "weights" / "model.safetensors"
        weights.write_bytes(b"12345")
        weights.chmod(0o600)


def test_a_model_is_made_once(tmp_path: Path) -> None:
    cache, make = ModelCache(tmp_path / "new" / "cache"), Maker()
    folder = cache.get_or_make("m", make)
    assert cache.get_or_make("m", make) == folder
    assert make.times == 1
    assert is_intact(folder)
    modes = {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()}
    assert modes == {"0o644"}
    assert oct(folder.stat().st_mode & 0o777) == "0o755"


@pytest.mark.parametrize("damage", ["truncate", "remove", "unmark", "garble"])
def test_a_damaged_model_is_made_again(tmp_path: Path, damage: str) -> None:
    cache, make = ModelCache(tmp_path), Maker()
    folder = cache.get_or_make("m", make)
    (marker,) = folder.glob(".*")
    match damage:
        case "truncate":
            os.truncate(folder / "weights" / "model.safetensors", 3)
        case "remove":
            (folder / "config.json").unlink()
        case "unmark":
            marker.unlink()
        case "garble":
            marker.write_text("[1]")
    assert not is_intact(folder)
    assert is_intact(cache.get_or_make("m", make))
    assert make.times == 2


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)

    def fail(out: Path) -> None:
        (out / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.get_or_make("m", fail)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m.lock"]
    assert is_intact(cache.get_or_make("m", Maker()))


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    leftover = tmp_path / "models" / "m.part-dead"
    leftover.mkdir(parents=True)
    ModelCache(tmp_path).get_or_make("m", Maker())
    assert not leftover.exists()


def test_the_second_waits_and_reuses(tmp_path: Path) -> None:
    first_is_making, second_waits = threading.Event(), threading.Event()
    make = Maker()

    def slow(out: Path) -> None:
        first_is_making.set()
        assert second_waits.wait(10)
        make(out)

    first = threading.Thread(target=ModelCache(tmp_path).get_or_make, args=("m", slow))
    first.start()
    assert first_is_making.wait(10)
    folder = ModelCache(tmp_path, on_wait=second_waits.set).get_or_make("m", make)
    first.join(10)
    assert is_intact(folder)
    assert make.times == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_root() == Path("/x/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_root() == Path("~/.cache/baton").expanduser()
    monkeypatch.setenv("BATON_CACHE", "/b")
    assert default_cache_root() == Path("/b")
