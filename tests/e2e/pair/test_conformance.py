"""`baton conformance` over real processes, disaggregated and colocated; and what no log may hold.

Both routers stand before the same decode worker, in float32: they must say the same to the letter.
"""

import subprocess
import sys

import httpx

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
