"""Key files: what a line may say, what is refused without repeating it, and whose a key is."""

from pathlib import Path

import pytest

from router import new_key
from router.keys import BadKeys, KeyRing, digest_of, line_of, parse
from router.keys import new_key as draw_key
from router.objective import Wish
from router.tenant import Limits, Tenant

KEY = "baton-" + "aB3_-" * 8 + "xyZ"
"""As one is drawn; always the same one, for it is in the names of tests."""
HEX = digest_of(KEY).hex()
WORDS = ("requests_per_min=60", "tokens_per_min=9000", "concurrent=2", "priority=-3", "weight=2.5")


def test_a_line_says_all_of_it() -> None:
    line = line_of(KEY, "acme", [*WORDS, "slo_ttft_ms=800", "slo_tpot_ms=0"])
    grant = parse(("here", f"# mine\n\n{line}  # Bob's\n")).find(KEY)
    assert grant is not None
    assert grant.tenant == Tenant("acme", -3, 2.5)
    assert grant.limits == Limits(60, 9000, 2)
    assert grant.wish == Wish(800, 0)


def test_only_the_whole_key_is_the_key() -> None:
    ring = parse(("here", line_of(KEY, "acme", ())))
    for wrong in ("", KEY[:-1], KEY + "x", KEY.upper(), HEX, f"sha256:{HEX}", "ключ", "\udc80"):
        assert ring.find(wrong) is None
    assert KeyRing().find(KEY) is None


def test_keys_are_random_and_nowhere_in_the_line_or_the_grant() -> None:
    keys = {draw_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 6 + 43 for key in keys)
    line = line_of(KEY, "acme", WORDS)
    grant = parse(("here", line)).find(KEY)
    assert KEY not in line
    assert HEX not in repr(grant)
    assert "digest" not in repr(grant)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (KEY, "line 2: must begin with sha256:"),
        (f"sha256:{HEX[1:]} tenant=a", "line 2: must begin"),
        (f"sha256:{HEX.upper()} tenant=a", "line 2: must begin"),
        (f"sha256:{HEX}", "line 2: no tenant"),
        (f"sha256:{HEX} tenant=", "line 2: tenant has no such value"),
        (f"sha256:{HEX} tenant=../x", "line 2: tenant has no such value"),
        (f"sha256:{HEX} tenant=ä", "line 2: tenant has no such value"),
        (f"sha256:{HEX} tenant=a {KEY}", "line 2: word 3 is no NAME=VALUE"),
        (f"sha256:{HEX} tenant=a key={KEY}", "line 2: word 3 is no NAME=VALUE"),
        (f"sha256:{HEX} tenant=a weight={KEY}", "line 2: weight has no such value"),
        (f"sha256:{HEX} tenant=a weight=1 weight=1", "line 2: weight stands there twice"),
        (f"sha256:{HEX} tenant=a weight=0", "line 2: weight is 0.01 to 100"),
        (f"sha256:{HEX} tenant=a priority=11", "line 2: priority is -10 to 10"),
        (f"sha256:{HEX} tenant=a concurrent=-1", "line 2: concurrent has no such value"),
        (f"sha256:{HEX} tenant=a concurrent=٣", "line 2: concurrent has no such value"),
        (f"sha256:{HEX} tenant=a\nsha256:{HEX} tenant=a", "stands there twice"),
    ],
)
def test_what_is_wrong_is_told_and_never_repeated(line: str, problem: str) -> None:
    with pytest.raises(BadKeys) as caught:
        parse(("keys.txt", f"# first\n{line}\n"))
    assert problem in str(caught.value)
    assert KEY not in str(caught.value)
    assert HEX not in str(caught.value)


def test_a_tenant_is_one_whatever_its_keys() -> None:
    first, second = line_of(KEY, "a", ["weight=2"]), line_of(draw_key(), "a", ["weight=3"])
    with pytest.raises(BadKeys, match="tenant a differ"):
        parse(("here", f"{first}\n{second}"))
    both = parse(("env", first), ("file", line_of(draw_key(), "a", ["weight=2", "concurrent=1"])))
    assert len(both.grants) == 2


def test_the_command_prints_a_key_and_a_line_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    new_key.main(["acme", "--requests-per-min", "60", "--priority=-1"])
    told = capsys.readouterr()
    grant = parse(("stderr", told.err)).find(told.out.strip())
    assert grant is not None
    assert (grant.limits.requests_per_min, grant.tenant.priority) == (60, -1)

    path = tmp_path / "keys"
    keys = []
    for tenant in ("a", "b"):
        new_key.main([tenant, "--file", str(path)])
        told = capsys.readouterr()
        assert told.err == ""
        keys.append(told.out.strip())
    ring = parse(("file", path.read_text()))
    found = [ring.find(key) for key in keys]
    assert [grant.tenant.name for grant in found if grant is not None] == ["a", "b"]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "argv",
    [["a b"], ["a;b"], ["a", "--weight", "1 concurrent=9"], ["a", "--weight", "x"], ["é"]],
)
def test_the_command_makes_no_line_that_means_something_else(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        new_key.main(argv)
    assert capsys.readouterr().out == ""


def test_the_command_leaves_a_broken_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("nonsense")
    with pytest.raises(SystemExit):
        new_key.main(["a", "--file", str(path)])
    assert path.read_text() == "nonsense"
    assert capsys.readouterr().out == ""
