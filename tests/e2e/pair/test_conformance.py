"""`baton conformance` over real processes, disaggregated and colocated; and what no log may hold.

Both routers stand before the same decode worker, in float32: they must say the same to the letter.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx

from tests.deploy.test_up import until
from tests.e2e.cluster import MODEL_NAME, Cluster

MARKER = "Xylophonquark"


def test_nothing_is_wrong_and_both_say_the_same(cluster: Cluster) -> None:
    urls = [f"--url={router.url}" for router in cluster.routers[:2]]
    command = [sys.executable, "-m", "deploy.cli", "conformance", *urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") >= 3 * 20
    shipped = cluster.routers[0].metrics()
    assert shipped.value("baton_local_prefills_total", reason="colocated") == 0
    cluster.assert_all_back()


def test_one_id_leads_through_all_logs(cluster: Cluster) -> None:
    said = "Quixotic zebras: which of them, and why?"
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": said}], "max_tokens": 4}
    reply = httpx.post(f"{cluster.routers[0].url}/v1/chat/completions", json=chat, timeout=20)
    request_id = reply.raise_for_status().headers["x-baton-request-id"]
    for process, event in (
        ("router-0", "request ended"),
        ("prefill-0", "prefill ended"),
        ("decode-0", "decode ended"),
    ):
        log = cluster.run_dir / f"{process}.log"
        until(partial(is_said, event, request_id, log))
        mine = [line for line in log.read_text().splitlines() if request_id in line]
        (ended,) = (line for line in mine if f'event="{event}"' in line)
        assert "level=info" in ended
        assert "outcome=completed" in ended or "outcome=done" in ended, ended
        for line in mine:
            assert "ebra" not in line


def is_said(event: str, request_id: str, log: Path) -> bool:
    lines = log.read_text().splitlines()
    return any(event in line and f"request_id={request_id}" in line for line in lines)


def test_no_log_holds_what_people_say(cluster: Cluster) -> None:
    """A chat, a stream, a refusal, a prompt that does not fit and a bad body: each with it."""
    url = cluster.routers[0].url
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": MARKER}], "max_tokens": 4}
    text = {"model": MODEL_NAME, "prompt": MARKER, "max_tokens": 4, "echo": True}
    assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=20).status_code == 200
    assert MARKER in httpx.post(f"{url}/v1/completions", json=text, timeout=20).text
    refused: list[dict[str, object]] = [
        {**chat, "stop": [MARKER], "temperature": 9},
        {**chat, "user": MARKER, "guided_regex": f"({MARKER}"},
        {**chat, "messages": [{"role": "user", "content": f"{MARKER} " * 2000}]},
    ]
    for body in refused:
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).status_code == 400
    streamed = httpx.post(f"{url}/v1/completions", json={**text, "stream": True, "echo": False})
    assert streamed.text.endswith("[DONE]\n\n")
    junk = f'{{"prompt": "{MARKER}'.encode()
    assert httpx.post(f"{url}/v1/completions", content=junk).status_code == 400
    logs = [*cluster.run_dir.glob("*.log")]
    assert len(logs) == len(cluster.workers) + len(cluster.routers)
    for log in logs:
        assert log.stat().st_size, log
        assert MARKER not in log.read_text(), log
