"""`baton status`, `chat`, `bench` and `doctor` as they look in a terminal, narrow and colourless
ones too, and what Ctrl-C in the middle does."""

import json
import re
from pathlib import Path

import httpx
import pexpect
import pytest

from tests.deploy.terminal import ESCAPE, run, terminal
from tests.e2e.up.cluster_up import ANSWER, QUESTION, Up

pytestmark = pytest.mark.parametrize("up", ["disaggregated"], indirect=True)

SYSTEM = "Be brief. Grüße 🎉"
LONG = "Tell me a long story about a fox and a crow."
"""The likeliest answer goes on beyond any patience; drawn ones may end at once."""


def where(up: Up) -> list[str]:
    return ["--run-dir", str(up.run_dir)]


def test_status_on_any_terminal(up: Up) -> None:
    shown, status = run("status", *where(up))
    assert status == 0
    assert "\x1b[" in shown
    plain = ESCAPE.sub("", shown)
    for word in ("smollm2", "prefill-0", "decode-0", "ready", "TTFT", "Ledger"):
        assert word in plain
    shown, status = run("status", *where(up), columns=60, NO_COLOR="1")
    assert status == 0
    assert "\x1b[3" not in shown
    plain = ESCAPE.sub("", shown)
    assert all(len(line) <= 60 for line in plain.splitlines()), plain
    assert "decode-0" in plain
    shown, status = run("status", *where(up), TERM="dumb")
    assert status == 0
    assert "\x1b" not in shown
    assert "decode-0" in shown


def test_status_for_programs_and_without_a_cluster(up: Up, tmp_path: Path) -> None:
    shown, status = run("status", "--url", up.url, "--json")
    assert status == 0
    assert {one["name"] for one in json.loads(shown)["cluster"]["workers"]} == {
        "prefill-0",
        "decode-0",
    }
    shown, status = run("status", "--run-dir", str(tmp_path))
    assert status == 1
    assert "start one with `baton up`" in shown
    shown, status = run("status", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "does not answer" in shown


def test_status_is_watched_until_ctrl_c(up: Up) -> None:
    with terminal("status", *where(up), "--watch", "--every-s", "0.2") as child:
        child.expect("Ledger")
        child.expect("Ledger")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0


def num_tokens(up: Up, system: str, question: str) -> int:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    count: int = httpx.post(f"{up.url}/tokenize", json={"messages": messages}).json()["count"]
    return count


def test_chat_answers_goes_on_and_explains(up: Up) -> None:
    with terminal("chat", *where(up), "--temperature", "0", "--max-tokens", "24") as child:
        child.expect("> ")
        child.sendline(QUESTION)
        child.expect_exact(ANSWER)
        child.expect("> ")
        child.sendline("/why")
        child.expect("prefill on (prefill|decode)-0, decode on decode-0")  # cached there by now
        child.expect("first byte after")
        child.sendline("/nonsense")
        child.expect("no such command")
        child.sendline("/new")
        child.sendline(f"/system {SYSTEM}")
        child.sendline(QUESTION)
        child.expect_exact(f"{QUESTION}\r\n")  # as it was typed
        child.expect_exact("\r\n> ")
        answer = child.before or ""
        child.sendline("/why")
        child.expect(r"request (\S+): ")
        assert isinstance(child.match, re.Match)
        told = httpx.get(f"{up.url}/v1/requests/{child.match[1]}").json()["prompts"][0]
        assert told["num_tokens"] == num_tokens(up, SYSTEM, QUESTION), "nothing of what was before"
        assert told["samples"][0]["num_tokens"] > 0
        assert re.search(r"\w", answer), "whatever it makes of that"
        child.expect("first byte after")
        child.sendeof()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0


def test_ctrl_c_ends_the_answer_and_then_the_program(up: Up) -> None:
    endless = ["--max-tokens", "1500", "--temperature", "0"]
    with terminal("chat", *where(up), *endless) as child:
        child.expect("> ")
        child.sendline(LONG)
        child.expect_exact(f"{LONG}\r\n")  # as it was typed
        child.expect(r"\w+\W+\w+\W+\w+")
        child.sendintr()
        child.expect_exact("[…]")
        child.expect("> ")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0


def test_chat_takes_one_question(up: Up) -> None:
    asked = ["chat", *where(up), "--temperature", "0", *QUESTION.split()]
    shown, status = run(*asked, columns=20, TERM="dumb")
    assert (shown, status) == (f"{ANSWER}\n", 0)
    shown, status = run("chat", *where(up), "--temperature", "9", "hello")
    assert status == 1
    assert "temperature" in shown


def test_bench_measures_and_draws(up: Up, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    load = ["--requests", "3", "--prompt-len", "40", "--output-len", "8"]
    shown, status = run("bench", *where(up), *load, *files, columns=60, TERM="dumb")
    assert status == 0, shown
    assert "\x1b" not in shown
    assert all(len(line) <= 60 for line in shown.splitlines()), shown
    assert re.search(r"TTFT ms\s+\d", shown)
    assert re.search(r"decode|prefill", shown), "the stages"
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["figures"]["requests"] == 3
    assert report["figures"]["failures"] == 0
    assert report["stages_ms"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_bench_is_cut_off(up: Up) -> None:
    with terminal("bench", *where(up), "--requests", "500", "--output-len", "64") as child:
        child.expect("requests")
        child.sendintr()
        child.expect("cut off")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 130


def test_doctor_looks_at_everything(up: Up) -> None:
    shown, _ = run("doctor", *where(up), columns=70, NO_COLOR="1")
    shown = ESCAPE.sub("", shown)
    assert re.search(r"UCX +ships [\d.]+ GB/s between two processes, over", shown), shown
    for word in ("python", "torch", "CUDA", "RDMA", "memory", "open files", "model"):
        assert word in shown
    assert "serves smollm2, disaggregated" in shown
