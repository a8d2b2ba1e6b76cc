"""What `baton doctor` finds, and what it says to do; a whole look is in tests/e2e/up."""

import json
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import doctor
from deploy.doctor import Finding
from tests.ports import free_port


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor._port(port)
    assert found.level == "fix"
    assert str(port) in found.said
    assert "--port" in found.advice


def test_a_router_that_is_named_and_does_not_answer() -> None:
    port = free_port()
    options = Namespace(url=f"http://127.0.0.1:{port}", api_key_file="", port=port)
    cluster, own = doctor._cluster(options)
    assert (cluster.what, cluster.level) == ("cluster", "note")
    assert "does not answer" in cluster.said
    assert own == Finding("port", "ok", f"{port} is free")


def test_rdma_devices_are_named(tmp_path: Path) -> None:
    (absent,) = doctor._rdma(Namespace(), tmp_path / "none")
    assert absent.level == "note"
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    (there,) = doctor._rdma(Namespace(), tmp_path)
    assert there.level == "ok"
    assert there.said.startswith("mlx5_0, mlx5_1")


def test_no_model_and_no_place_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    last = list(doctor._cache(Namespace()))[-1]
    assert last.level == "note"
    assert "baton prepare" in last.advice
    monkeypatch.setattr("os.access", lambda place, mode: False)
    (unwritable,) = doctor._cache(Namespace())
    assert unwritable.level == "fix"
    assert "BATON_CACHE" in unwritable.advice


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("note", 0), ("fix", 1)])
def test_the_exit_status_says_whether_there_is_something_to_fix(
    level: doctor.Level,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def look(options: Namespace) -> Iterator[Finding]:
        yield Finding("it", level, "is so", "do that")

    monkeypatch.setattr(doctor, "LOOKS", (look,))
    assert doctor.main([]) == status
    assert "do that" in capsys.readouterr().out
    assert doctor.main(["--json"]) == status
    assert json.loads(capsys.readouterr().out)[0]["advice"] == "do that"
