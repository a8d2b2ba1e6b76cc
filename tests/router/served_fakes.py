"""`python -m tests.router.served_fakes FOLDER`: a router over fake workers, for clients that need a
server in another process. Prints its URL, and ends when its input does."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from prometheus_client import CollectorRegistry

from router.app import build_app
from router.server import RouterServer
from router.tokenizer import TextTokenizer
from runtime import log
from tests.router.configs import config_for
from tests.router.fake_workers import fake_cluster, until

ANSWER = "Paris 🌍 is it."


async def serve(folder: Path) -> None:
    tokenizer = TextTokenizer.from_folder(folder)
    async with fake_cluster(tokenizer.encode(ANSWER)) as cluster:
        for worker in cluster.workers:
            worker.status.max_model_len = 1 << 16
        config = config_for(cluster, request_timeout_s=30.0, inactivity_s=5.0)
        app = build_app(config, tokenizer, CollectorRegistry())
        server = RouterServer(
            app, host="127.0.0.1", port=0, grace_s=0.3, head_timeout_s=30, send_timeout_s=30
        )
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        await until(lambda: app.state.router.dispatcher.is_ready)
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"http://127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


@contextmanager
def served_fakes(folder: Path) -> Iterator[str]:
    """The URL."""
    command = [sys.executable, "-m", "tests.router.served_fakes", str(folder)]
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            assert url, "the server did not start"
            yield url
        finally:
            process.stdin.close()
            process.wait(timeout=10)
    assert process.returncode == 0


if __name__ == "__main__":
    log.configure("router")  # on stderr: the URL is the only line on stdout
    asyncio.run(serve(Path(sys.argv[1])))
