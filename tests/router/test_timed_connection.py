"""What is written of an answer and not taken: whoever takes none of it is left."""

import asyncio
import socket

import pytest

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import fake_cluster, until

SEND_TIMEOUT_S = 0.6
PATH = "/openapi.json"
NUM_REQUESTS = 20
"""One answer is more than sockets as small as these take, and as many are more than the router
writes without waiting."""
BUFFER_NBYTES = 4096
SEGMENT_NBYTES = 536


def client(router: RunningRouter) -> socket.socket:
    (listening,) = router.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES)  # and those of clients
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_NBYTES)
    host, _, port = router.url.removeprefix("http://").partition(":")
    connection.connect((host, int(port)))
    connection.setblocking(False)
    return connection


def asking(*headers: str) -> bytes:
    return "\r\n".join((f"GET {PATH} HTTP/1.1", "Host: x", *headers, "", "")).encode()


@pytest.mark.parametrize("num_requests", [1, NUM_REQUESTS])
async def test_who_takes_nothing_is_left(start_router: StartRouter, num_requests: int) -> None:
    """With what is written of the last answer, or in the middle of them."""
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster, send_timeout_s=SEND_TIMEOUT_S) as router,
    ):
        connections = router.server.server_state.connections
        with client(router) as connection:
            connection.send(asking() * (num_requests - 1) + asking("Connection: close"))
            await until(lambda: len(connections) == 1)
            await until(lambda: not connections)


async def test_who_takes_little_gets_all_of_it(start_router: StartRouter) -> None:
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster, send_timeout_s=SEND_TIMEOUT_S) as router,
    ):
        whole = (await router.http.get(PATH)).content
        loop, heard = asyncio.get_running_loop(), b""
        with client(router) as connection:
            began = loop.time()
            connection.send(asking("Connection: close"))
            while piece := await loop.sock_recv(connection, len(whole) // 20):
                heard += piece
                await asyncio.sleep(SEND_TIMEOUT_S / 5)
        assert heard.endswith(whole)
        assert loop.time() - began > 2 * SEND_TIMEOUT_S
