"""256 clients that ask for long streams and read nothing: what the router holds for them has a
bound, and who reads is served as quickly as by a router that has none of them. That such a client
is left after the time for sending is in test_body.py; here that time does not come."""

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken

from bench.router_client import complete
from bench.router_processes import spawn_fakes, spawn_router
from tests.router.model_folder import byte_level_tokenizer, write_model_folder

NUM_READERS = 256
NUM_TOKENS = 128
WORD = "\x01" * 1000
"""One token; JSON writes a character of it with six: 3/4 MiB for each reader, 192 for all."""
BUFFER_NBYTES = 4096
SEGMENT_NBYTES = 536
"""Of the readers' sockets: the kernel takes some tens of kilobytes for each, not megabytes."""

CHUNK_NBYTES = 6 * len(WORD) + 300
WRITTEN_NBYTES = (64 << 10) + 2 * CHUNK_NBYTES
"""Up to the transport's high-water mark; a chunk goes over it, and one more waits behind it."""
PIECES_NBYTES = NUM_TOKENS * (len(WORD) + 400)
"""Not chunks yet: a text and a few small objects for each token, as many as were asked for
(router/generation.py)."""
REQUEST_NBYTES = 96 << 10
"""A connection, a call with its buffers, tasks, records."""


@dataclass(frozen=True)
class Router:
    port: int
    process: psutil.Process

    def peak_nbytes(self) -> int:
        """Of its memory, so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    def metric(self, name: str) -> float:
        """The sum of its samples."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=20).text
        families = text_string_to_metric_families(text)
        return sum(s.value for f in families for s in f.samples if s.name == name)

    async def seconds_of_one(self, seed: int) -> float:
        """For the answer of a client that reads."""
        began = time.monotonic()
        heard = await complete(self.port, "fake", "Hi", seed=seed, max_tokens=NUM_TOKENS, pace=0)
        assert len(heard.events) >= NUM_TOKENS
        return time.monotonic() - began


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[list[Router]]:
    """Two that are alike, each with a worker of its own."""
    model = tmp_path / "model"
    model.mkdir()
    write_model_folder(model)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(WORD, normalized=False)])
    vocabulary = tokenizer.get_vocab()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))
    with ExitStack() as stack:
        routers = []
        words = {WORD: vocabulary[WORD]}
        for worker in spawn_fakes(stack, "grpc", 2, words, tmp_path).ports:
            command = [sys.executable, "-m", "router", "--mode", "colocated"]
            command += ["--decode", f"127.0.0.1:{worker}", "--model-path", str(model)]
            command += ["--served-model-name", "fake", "--send-timeout-s", "600"]
            port, pid = spawn_router(stack, command, "/readyz", cwd=Path.cwd())
            routers.append(Router(port, psutil.Process(pid)))
        yield routers


async def test_many_slow_readers(routers: list[Router]) -> None:
    beset, free = routers
    for seed in range(5):  # what is made once is made
        await beset.seconds_of_one(seed)
        await free.seconds_of_one(seed)
    before, files = beset.peak_nbytes(), beset.process.num_fds()
    answered = beset.metric("baton_request_output_tokens_total")
    with ExitStack() as readers:
        for seed in range(NUM_READERS):
            readers.enter_context(slow_reader(beset.port, seed))
        until(
            lambda: (
                beset.metric("baton_request_output_tokens_total")
                == answered + NUM_READERS * NUM_TOKENS
            ),
            "the workers are held up",
        )
        # By turns: what else the machine does, it does to both.
        times = [
            (await beset.seconds_of_one(seed), await free.seconds_of_one(seed))
            for seed in range(15)
        ]
        assert beset.metric("baton_requests_in_flight") == NUM_READERS, "not all at once"
    until(lambda: beset.metric("baton_requests_in_flight") == 0, "they are not missed")
    until(lambda: beset.process.num_fds() <= files, "their connections are kept")
    held = (beset.peak_nbytes() - before) / NUM_READERS
    assert held < WRITTEN_NBYTES + PIECES_NBYTES + REQUEST_NBYTES < NUM_TOKENS * CHUNK_NBYTES / 2
    medians = [statistics.median(of_one) for of_one in zip(*times, strict=True)]
    assert medians[0] < 1.5 * medians[1]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def slow_reader(port: int, seed: int) -> socket.socket:
    """It has asked, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_NBYTES)
    connection.connect(("127.0.0.1", port))
    fields = {"model": "fake", "prompt": "Hi", "stream": True, "seed": seed}
    content = json.dumps({**fields, "max_tokens": NUM_TOKENS, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        "Content-Type: application/json\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection
