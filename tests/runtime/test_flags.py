"""One field, one flag; the command line over the environment over the default."""

from dataclasses import dataclass
from typing import Literal

import pytest

from runtime.flags import flag, nbytes, parse, to_argv


@dataclass(frozen=True)
class Config:
    name: str = flag(help="required")
    port: int = flag(8000, help="port to listen on, 100% needed")
    prefill: tuple[str, ...] = flag((), help="addresses")
    dtype: Literal["auto", "float32"] = flag("auto", help="data type")
    checksum: bool = flag(True, help="check frames")
    kv_memory: int = flag(1 << 30, help="KV pool", parse=nbytes)
    num_blocks: int | None = flag(None, help="instead of memory")


def parsed(*argv: str, **environ: str) -> Config:
    return parse(Config, ["--name=a", *argv], prog="x", description="y", environ=environ)


def test_defaults_and_every_type() -> None:
    assert parsed() == Config(name="a")
    given = parsed(
        "--port=1", "--prefill=a:1, b:2,", "--dtype=float32", "--no-checksum",
        "--kv-memory=1.5MiB", "--num-blocks=7",
    )  # fmt: skip
    assert given == Config("a", 1, ("a:1", "b:2"), "float32", False, 3 << 19, 7)


def test_environment_is_below_the_command_line_and_above_the_default() -> None:
    environ = {"BATON_PORT": "1", "BATON_CHECKSUM": "0", "BATON_KV_MEMORY": "2GiB"}
    assert parsed("--port=2", **environ) == Config("a", port=2, checksum=False, kv_memory=2 << 30)
    assert parse(Config, [], prog="x", description="y", environ={"BATON_NAME": "b"}).name == "b"


@pytest.mark.parametrize(
    ("argv", "environ", "complaint"),
    [
        (["--nam=a"], {}, "--name"),
        (["--name=a", "--colour=red"], {}, "--colour"),
        (["--name=a", "--port=x"], {}, "--port"),
        (["--name=a", "--kv-memory=1parsec"], {}, "512MiB"),
        (["--name=a", "--dtype=int3"], {}, "float32"),
        (["--name=a"], {"BATON_PORT": "x"}, "BATON_PORT"),
        (["--name=a"], {"BATON_DTYPE": "int3"}, "BATON_DTYPE"),
        (["--name=a"], {"BATON_CHECKSUM": "maybe"}, "BATON_CHECKSUM"),
    ],
)
def test_mistakes_end_with_a_usage_line(
    argv: list[str], environ: dict[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(Config, argv, prog="x", description="y", environ=environ)
    assert complaint in capsys.readouterr().err


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(Config, ["--help"], prog="x", description="y", environ={})
    text = capsys.readouterr().out
    assert "100% needed (default: 8000)" in text
    assert "KV pool (default: 1GiB)" in text
    assert "--no-checksum" in text


def test_to_argv_is_the_way_back_whatever_the_environment_says() -> None:
    environ = {"BATON_PORT": "1", "BATON_CHECKSUM": "0", "BATON_PREFILL": "x", "BATON_NAME": "y"}
    for config in (
        Config("a"),
        Config("a", 1, ("a:1", "b:2"), "float32", False, 3 << 19, 7),
        Config("--name", prefill=("-x",)),
    ):
        again = parse(Config, to_argv(config), prog="x", description="y", environ=environ)
        assert again == config
