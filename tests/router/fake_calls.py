"""Calls to fake workers, as a test's scripts see them: what can be said, and the happy course."""

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import grpc

from protos import serving_pb2 as pb
from tests.router.fake_logprobs import logprobs_of, prompt_logprobs_of
from tests.router.fake_relay import Relay

FINGERPRINT = b"f" * 32

Request = TypeVar("Request")
T = TypeVar("T")


class Call(Generic[Request]):
    """One call, as a script sees it."""

    def __init__(self, relay: Relay, request: Request, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        self.relay = relay
        self.request = request
        self.context = context

    async def fail(self, code: grpc.StatusCode, text: str = "so says the test") -> None:
        await self.context.abort(code, text)

    async def hang(self) -> None:
        await asyncio.Event().wait()


class GenerateCall(Call[pb.GenerateRequest]):
    renewals: asyncio.Queue[bytes]

    async def heartbeat(self) -> None:
        await self.context.write(pb.GenerateEvent(heartbeat=pb.Heartbeat()))

    async def beating(self, coming: Coroutine[Any, Any, T]) -> T:
        """What comes, with heartbeats until it does."""
        task = asyncio.create_task(coming)
        while not (await asyncio.wait({task}, timeout=0.05))[0]:
            await self.heartbeat()
        return task.result()

    async def reserve(self, *, replaces_lost: bool = False) -> bytes:
        transfer_id = secrets.token_bytes(16)
        ticket = pb.KVTicket(
            transfer_id=transfer_id,
            shards=[pb.KVShard(address="ucx://nowhere:1", num_heads=1)],
            fingerprint=FINGERPRINT,
            num_tokens=len(self.request.prompt_token_ids),
            block_size=16,
            replaces_lost=replaces_lost,
        )
        await self.context.write(pb.GenerateEvent(reserved=ticket))
        return transfer_id

    async def tokens(
        self, first_index: int, token_ids: Sequence[int], hit: int = 0, sample: int = 0
    ) -> None:
        tokens = pb.Tokens(
            sample=sample,
            first_index=first_index,
            token_ids=token_ids,
            num_cached_tokens=hit,
            logprobs=logprobs_of(token_ids, self.request.sampling.num_logprobs),
        )
        await self.context.write(pb.GenerateEvent(tokens=tokens))

    async def finish(
        self, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP, sample: int = 0
    ) -> None:
        finished = pb.Finished(sample=sample, reason=reason)
        await self.context.write(pb.GenerateEvent(finished=finished))

    @property
    def num_delivered(self) -> int:
        return len(self.request.samples[0].output_token_ids)

    async def say_rest(self, start: int, hit: int = 0, sample: int = 0) -> None:
        """Tokens [start, …) of the answer, one by one, and the end."""
        answer = self.relay.answer_of(sample)
        end = min(len(answer), self.request.sampling.max_tokens)
        for index in range(start, end):
            await self.tokens(index, [answer[index]], 0 if index else hit, sample)
        is_whole = end == len(answer)
        await self.finish(pb.FINISH_REASON_STOP if is_whole else pb.FINISH_REASON_LENGTH, sample)

    async def prompt_logprobs(self) -> None:
        for told in prompt_logprobs_of(self.request):
            await self.context.write(pb.GenerateEvent(prompt_logprobs=told))

    async def run_happily(self) -> None:
        hit = self.relay.decode_hit
        if self.request.local_prefill:
            await self.prompt_logprobs()
        else:
            transfer_id = await self.reserve()
            await self.relay.commit(transfer_id)
            hit = max(hit, self.relay.prefill_hit)  # as COMMIT says: `FirstToken` may come later
        for sample, known in enumerate(self.request.samples):
            if not known.is_finished:
                await self.say_rest(len(known.output_token_ids), hit, sample)


class PrefillCall(Call[pb.PrefillRequest]):
    async def heartbeat(self) -> None:
        await self.context.write(pb.PrefillEvent(heartbeat=pb.Heartbeat()))

    async def first_token(
        self,
        token_id: int | None = None,
        reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED,
        sample: int = 0,
    ) -> None:
        if token_id is None:
            token_id = self.relay.answer_of(sample)[0]
        hit = self.relay.prefill_hit
        first = pb.FirstToken(
            sample=sample, token_id=token_id, finish_reason=reason, num_cached_tokens=hit
        )
        for entry in logprobs_of([token_id], self.request.sampling.num_logprobs):
            first.logprobs.CopyFrom(entry)
        await self.context.write(pb.PrefillEvent(first_token=first))

    async def ship(self) -> None:
        commit = self.relay.commit(self.request.ticket.transfer_id)
        if not commit.done():
            commit.set_result(list(self.relay.answer[:1]))
        await self.context.write(pb.PrefillEvent(shipped=pb.Shipped()))

    async def prompt_logprobs(self) -> None:
        for told in prompt_logprobs_of(self.request):
            await self.context.write(pb.PrefillEvent(prompt_logprobs=told))

    async def run_happily(self) -> None:
        await self.prompt_logprobs()
        known = self.request.samples
        wanted = [index for index, sample in enumerate(known) if not sample.is_finished]
        if self.request.sampling.max_tokens == 1:
            for sample in wanted:
                await self.first_token(reason=pb.FINISH_REASON_LENGTH, sample=sample)
            return
        if not any(sample.output_token_ids for sample in known):
            for sample in wanted:
                await self.first_token(sample=sample)
        await self.ship()
