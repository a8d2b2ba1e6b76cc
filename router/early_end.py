"""Tells a decode worker of samples that the router has ended, so that it computes no more of them.

A sample that ends by a stop string ends here, where there is text, while others of its request go
on. What the worker sends of it meanwhile is not delivered. Only a kindness: a worker that does not
hear of it computes what nobody reads, until the stream ends.
"""

import asyncio

import grpc

from router.messages import finish_request
from router.progress import Progress
from router.tasks import cancel_and_wait
from router.workers import DecodeWorker
from runtime.log import get_logger

log = get_logger()

_TIMEOUT_S = 3.0


class EarlyEnds:
    """Of one Generate stream; `close` ends what is under way."""

    def __init__(self, decode: DecodeWorker, progress: Progress) -> None:
        self._decode = decode
        self._progress = progress
        self._known: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def note_tokens(self, sample: int) -> None:
        """The worker has told tokens of it, so it has begun there. If nobody wants more of it, but
        of others, the worker hears so, once. It may have ended before it began, by what prefill
        told of it."""
        is_over = self._progress.sample(sample).has_ended
        if not is_over or self._progress.has_ended or sample in self._known:
            return
        self._known.add(sample)
        task = asyncio.create_task(self._tell(sample))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note_finished(self, sample: int) -> None:
        """The worker has ended it."""
        self._known.add(sample)

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)

    async def _tell(self, sample: int) -> None:
        request = finish_request(self._progress.prompt, sample)
        try:
            await self._decode.stub.Finish(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("a sample goes on", worker=self._decode.name, reason=error.code().name)
