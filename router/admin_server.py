"""Serves the admin API beside the router's own port, in the same loop.

1. `AdminServer(app, host, port)` binds at once, so that a port that is taken ends the start.
2. `start` serves; `close` takes no more requests, lets those under way end, and closes the port.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from router.admin import build_admin
from router.config import RouterConfig
from router.fleet import Fleet
from router.pins import PinBoard
from router.pins_api import ReadPrompt
from router.tasks import cancel_and_wait

_CLOSE_S = 2.0


class NoToken(Exception):
    """The admin API shall be served, but there is no token for it."""


class CannotListen(Exception):
    """The admin port is taken, or not an address of this machine."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the router's own server's."""
        yield


class AdminServer:
    """See the module."""

    def __init__(self, app: FastAPI, *, host: str, port: int) -> None:
        """Raises CannotListen. Port 0 takes a free one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise CannotListen(f"cannot serve the admin API on {host}:{port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=_CLOSE_S)
            await cancel_and_wait(self._serving)
        self._socket.close()


def read_token(config: RouterConfig) -> str:
    """Empty: there is to be no admin API. Raises NoToken."""
    if not config.admin_port:
        return ""
    if not config.admin_token_file:
        raise NoToken("--admin-port needs --admin-token-file")
    try:
        token = Path(config.admin_token_file).read_text().strip()
    except (OSError, ValueError) as error:
        raise NoToken(f"cannot read the admin token: {error}") from error
    if not token:
        raise NoToken(f"{config.admin_token_file} holds no token")
    return token


def admin_server(
    config: RouterConfig, fleet: Fleet, pins: PinBoard, read_prompt: ReadPrompt
) -> AdminServer | None:
    """None: none is wanted. Raises NoToken, CannotListen."""
    token = read_token(config)
    if not token:
        return None
    app = build_admin(fleet, pins, read_prompt, token)
    return AdminServer(app, host=config.admin_host, port=config.admin_port)
