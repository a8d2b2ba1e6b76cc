"""`GET /v1/cluster`, and the same as it changes: `GET /v1/cluster/events`.

For operators, where there are keys (router/gate.py): both tell of everybody's requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import Response

from router.cluster_feed import ClusterFeed, FeedResponse
from router.cluster_reader import ClusterReader
from router.cluster_view import ClusterView
from router.openapi import answers, texts


@dataclass(frozen=True)
class ClusterWatch:
    """What the two endpoints need. Made inside the running loop."""

    reader: ClusterReader
    feed: ClusterFeed
    send_timeout_s: float

    @classmethod
    def over(
        cls, reader: ClusterReader, *, max_viewers: int, send_timeout_s: float
    ) -> "ClusterWatch":
        topics = {
            "cluster": reader.cluster_json,
            "requests": reader.requests_json,
            "latency": reader.latency_json,
        }
        return cls(reader, ClusterFeed(topics, max_viewers), send_timeout_s)


def add_cluster(app: FastAPI, watch_of: Callable[[Request], ClusterWatch]) -> None:
    @app.get("/v1/cluster", responses=answers(ClusterView))
    async def cluster(request: Request) -> Response:
        told = watch_of(request).reader.view()
        return Response(told.model_dump_json(), media_type="application/json")

    @app.get("/v1/cluster/events", responses=texts("text/event-stream"), response_class=Response)
    async def events(request: Request) -> Response:
        watch = watch_of(request)
        return FeedResponse(watch.feed, watch.send_timeout_s)
