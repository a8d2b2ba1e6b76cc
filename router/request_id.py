"""Names every request: in its response's header, in every log line, and in calls to workers."""

import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.request import RequestId
from runtime.log import bind_request

HEADER = "x-baton-request-id"
_KEY = "baton.request_id"


class RequestIds:
    """ASGI middleware. A client's own id is not taken over: ours must not collide."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope[_KEY] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with bind_request(request_id):
            await self._app(scope, receive, send_named)


def request_id_of(scope: Scope) -> RequestId:
    return RequestId(scope[_KEY])
