"""`baton up` as a newcomer meets it: real workers, the real model, a client of OpenAI's."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import httpx
import psutil
from pydantic import BaseModel, Field

from deploy.dashboard_panels import DASHBOARDS
from tests.e2e.cluster import scrape
from tests.e2e.up.cluster_up import ANSWER, QUESTION, Up

ROOT = Path(__file__).parents[3]


def test_ready_line_has_a_curl_that_works(up: Up) -> None:
    command = shlex.split(up.ready_line[up.ready_line.index("curl") :])
    answer = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert json.loads(answer)["choices"][0]["message"]["content"]


def test_openai_client_streams(up: Up) -> None:
    with up.client() as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_dashboards_and_alerts_name_what_is_exported(up: Up) -> None:
    up.ask()
    addresses = [row["addresses"] for row in up.cluster().values()]
    exported = set()
    for address in addresses:
        assert isinstance(address, dict)
        scraped = httpx.get(f"http://{address['metrics']}/metrics", timeout=5).text
        exported |= set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))
    rules = (ROOT / "deploy/alerts.yml").read_text()
    panels = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]
    expressions = [
        *re.findall(r"expr: [^#]*", rules),
        *(q for p in panels for q in p.queries.values()),
    ]
    for expression in expressions:
        names = set(re.findall(r"\b(?:baton|process|vllm:)_\w+", expression))
        wanted = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
        assert wanted <= exported, (expression, wanted - exported)


class City(BaseModel):
    """What the client makes a strict schema of."""

    name: Literal["Paris", "London"]
    is_capital: bool
    neighbours: Annotated[list[Literal["Lille", "Lyon"]], Field(max_length=2)]


def test_openai_client_parses_structured_outputs(up: Up) -> None:
    with up.client() as client:
        completion = client.chat.completions.parse(
            model="smollm2",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=100,
            response_format=City,
        )
    assert completion.choices[0].message.parsed is not None
    assert completion.choices[0].finish_reason == "stop"


def test_cluster_json_names_every_process(up: Up) -> None:
    rows = up.cluster()
    assert {"router", "decode-0"} <= set(rows)
    assert ("prefill-0" in rows) == ("decode-0" in rows and len(rows) == 3)
    for row in rows.values():
        assert set(row) == {"name", "role", "pid", "addresses", "log"}
        assert psutil.pid_exists(int(str(row["pid"])))
        assert Path(str(row["log"])).exists()


def test_a_worker_takes_both_roles_and_is_drained(up: Up) -> None:
    def baton(*argv: str) -> str:
        command = [sys.executable, "-m", "deploy.cli", *argv, "--run-dir", str(up.run_dir)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert (up.run_dir / "admin-token").stat().st_mode & 0o077 == 0
    assert "decode+prefill" in baton("flip", "decode-0", "both")
    if "prefill-0" in up.cluster():
        baton("drain", "prefill-0", "--grace-s", "1")
        assert "nothing" in baton("workers")
        assert up.ask() == ANSWER
        baton("flip", "prefill-0", "prefill")
    assert "decode-0" in baton("flip", "decode-0", "decode")
    assert up.ask() == ANSWER


def test_dead_worker_is_started_again(up: Up) -> None:
    for name in [name for name in up.cluster() if name != "router"]:
        before = up.cluster()[name]
        os.kill(int(str(before["pid"])), signal.SIGKILL)
        assert up.ask() == ANSWER, "the fault costs time, not the answer"
        deadline = time.monotonic() + 20
        while up.cluster()[name]["pid"] == before["pid"]:
            assert time.monotonic() < deadline, f"{name} was not started again"
            time.sleep(0.05)
        assert up.cluster()[name]["addresses"] == before["addresses"]
    deadline = time.monotonic() + 30
    while scrape(f"{up.url}/metrics").value("baton_workers_ready", role="decode") < 1:
        assert time.monotonic() < deadline, "the new worker is not used"
        time.sleep(0.05)
    assert up.ask() == ANSWER
