"""The run directory has one owner, and its list is always whole."""

import json
from pathlib import Path

import pytest

from deploy.state import Member, RunDir, RunDirUnusable

MEMBER = Member("decode-0", "decode", 1, {"grpc": "127.0.0.1:1"}, "/decode-0.log")


def test_the_list_lives_as_long_as_the_cluster(tmp_path: Path) -> None:
    cluster = tmp_path / "deep" / "run" / "cluster.json"
    with RunDir(cluster.parent) as run_dir:
        run_dir.write([MEMBER])
        run_dir.write([MEMBER, MEMBER])
        run_dir.draw_admin_token()
        first = run_dir.admin_token_file.read_text()
        run_dir.draw_admin_token()
        assert run_dir.admin_token_file.stat().st_mode & 0o777 == 0o600
        assert first != run_dir.admin_token_file.read_text()
        assert json.loads(cluster.read_text())[1] == {
            "name": "decode-0",
            "role": "decode",
            "pid": 1,
            "addresses": {"grpc": "127.0.0.1:1"},
            "log": "/decode-0.log",
        }
    assert [path.name for path in cluster.parent.iterdir()] == ["lock"]


def test_a_second_owner_is_refused_until_the_first_has_left(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.write([])
        with pytest.raises(RunDirUnusable, match="--run-dir"), RunDir(tmp_path):
            pass
        assert (tmp_path / "cluster.json").exists()
    with RunDir(tmp_path):
        pass


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirUnusable, match="cannot use"), RunDir(tmp_path / "file"):
        pass
