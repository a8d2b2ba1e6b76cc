"""Runs the app under uvicorn, with an end that is kind to open requests.

On SIGTERM or SIGINT no new connection is taken; open requests have the grace to finish, then each
gets an error, and what has not ended a second later is cancelled.
"""

import asyncio
import math
import socket

import uvicorn
from fastapi import FastAPI

from router.http_tls import HttpTLS
from router.timed_connection import TimedConfig

KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, or they race with our close


class RouterServer(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        *,
        host: str,
        port: int,
        grace_s: float,
        head_timeout_s: float,
        send_timeout_s: float,
        tls: HttpTLS | None = None,
    ) -> None:
        super().__init__(
            TimedConfig(
                app,
                head_timeout_s=head_timeout_s,
                send_timeout_s=send_timeout_s,
                host=host,
                port=port,
                ssl_certfile=tls.certificate if tls is not None else None,
                ssl_keyfile=tls.key if tls is not None else None,
                loop="uvloop",
                lifespan="on",
                access_log=False,
                proxy_headers=False,  # nobody asks where a request comes from
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(grace_s) + 1,
            )
        )
        self.app = app
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        router = self.app.state.router
        router.cluster.feed.close()  # who only watches has no grace
        stop = router.dispatcher.stop
        timer = asyncio.get_running_loop().call_later(self._grace_s, stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
