"""Faults on purpose: a transport around another one, that harms a share of the messages sent.

Off unless `FabricConfig.faults` says otherwise, and that is for tests. A plan is a list of rules,
`kind:fault:probability[:seconds=S][:times=N][:after=N]`, separated by commas, with a last `seed=N`:

    kv:drop:0.01,commit:delay:0.5:seconds=0.2,*:kill:1:times=1,seed=7

`@PATH` is a file with such a list in it, read again when it changes: so a test harms a process that
runs, now so and now otherwise. No file, or an empty one: no rules.

1. Each message sent is of one kind, by what it says of itself. The first rule for that kind whose
   draw hits harms it; a rule with `times` hits no more often than that, and one with `after`
   lets so many of its kind pass first.
2. A message that is held up (`delay`, `reorder`, `stall`) holds up what follows on its channel, as
   a network in order would; `reorder` lets just the next one pass.
3. `drop` and `corrupt` succeed for whoever sent, as they do on a network.
"""

import asyncio
import random
from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvfabric.control import Abort, Hello, Offer, Paced, Recall, Refused, Welcome, decode_control
from kvfabric.errors import PeerLost
from kvfabric.frame import FrameKind, read_frame
from kvfabric.tasks import end
from kvfabric.transport import Channel, Endpoint, Listener, OnEndpoint, Transport

DEFAULT_SECONDS = 0.05
ANY = "*"


class Fault(StrEnum):
    DROP = "drop"
    DELAY = "delay"
    """Sent `seconds` later."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """Sent behind the next message of the channel, or `seconds` later if none comes."""
    CORRUPT = "corrupt"
    """One bit is another one."""
    TRUNCATE = "truncate"
    STALL = "stall"
    """Neither this nor anything after it on the channel is sent; the connection stays."""
    KILL = "kill"
    """The connection breaks."""


_CONTROL_KINDS = {
    Hello: "hello",
    Welcome: "welcome",
    Refused: "refused",
    Offer: "offer",
    Abort: "abort",
    Paced: "paced",
    Recall: "recall",
}
_FRAME_KINDS = {FrameKind.KV: "kv", FrameKind.COMMIT: "commit", FrameKind.VOID: "void"}
KINDS = (*_CONTROL_KINDS.values(), *_FRAME_KINDS.values())


@dataclass(slots=True)
class Rule:
    """One rule of a plan; `times` and `after` count down."""

    kind: str
    fault: Fault
    probability: float
    seconds: float = DEFAULT_SECONDS
    times: int | None = None
    after: int = 0


class FaultPlan:
    """Which message is harmed, and how; the same for the same seed and messages."""

    def __init__(self, rules: list[Rule], seed: int = 0) -> None:
        self.injected: Counter[str] = Counter()
        """How often each `kind:fault` has hit."""
        self.random = random.Random(seed)
        self._rules = rules

    @classmethod
    def parse(cls, text: str) -> "FaultPlan":
        """See the module. Raises ValueError."""
        return _FilePlan(Path(text[1:])) if text.startswith("@") else cls(*_parse_rules(text))

    def draw(self, kind: str) -> Rule | None:
        for rule in self._rules:
            if rule.kind not in (kind, ANY) or rule.times == 0:
                continue
            if rule.after:
                rule.after -= 1
            elif self.random.random() < rule.probability:
                rule.times = None if rule.times is None else rule.times - 1
                self.injected[f"{kind}:{rule.fault}"] += 1
                return rule
        return None


class _FilePlan(FaultPlan):
    def __init__(self, path: Path) -> None:
        super().__init__([])
        self._path = path
        self._changed_ns: int | None = None

    def draw(self, kind: str) -> Rule | None:
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            self._rules, seed = _parse_rules(self._path.read_text())
            self.random.seed(seed)
        return super().draw(kind)


def _parse_rules(text: str) -> tuple[list[Rule], int]:
    """And the seed."""
    rules, seed = [], 0
    for part in filter(None, text.split(",")):
        if part.startswith("seed="):
            seed = int(part.removeprefix("seed="))
        else:
            rules.append(_parse_rule(part))
    return rules, seed


def _parse_rule(text: str) -> Rule:
    kind, fault, probability, *options = text.split(":")
    if kind not in (*KINDS, ANY):
        raise ValueError(f"{text}: {kind!r} is no kind of message; there are {', '.join(KINDS)}")
    rule = Rule(kind, Fault(fault), float(probability))
    for option in options:
        match option.partition("="):
            case ("seconds", _, value):
                rule.seconds = float(value)
            case ("times", _, value):
                rule.times = int(value)
            case ("after", _, value):
                rule.after = int(value)
            case _:
                raise ValueError(f"{text}: {option!r} is not seconds=S, times=N or after=N")
    return rule


def kind_of(channel: Channel, message: bytes | memoryview) -> str:
    """What a message of ours says it is."""
    if channel is Channel.FRAMES:
        return _FRAME_KINDS[read_frame(memoryview(message)).kind]
    return _CONTROL_KINDS[type(decode_control(bytes(message)))]


@dataclass(slots=True, eq=False)
class _Held:
    """A message on its way through a channel, and the future that its sender has."""

    message: bytes | memoryview
    rule: Rule | None
    done: asyncio.Future[None]


class _FaultyEndpoint(Endpoint):
    def __init__(self, inner: Endpoint, plan: FaultPlan) -> None:
        self._inner = inner
        self.direct = inner.direct
        self._plan = plan
        self._held: dict[Channel, deque[_Held]] = {channel: deque() for channel in Channel}
        self._arrived = {channel: asyncio.Event() for channel in Channel}
        self._pumps: dict[Channel, asyncio.Task[None]] = {}

    def send(self, channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
        rule = self._plan.draw(kind_of(channel, message))
        is_held_up = channel in self._pumps
        if rule is None and not is_held_up:
            return self._inner.send(channel, message)
        done = asyncio.get_running_loop().create_future()
        self._held[channel].append(_Held(message, rule, done))
        self._arrived[channel].set()
        if not is_held_up:
            self._pumps[channel] = asyncio.create_task(self._pump(channel))
        return done

    def recv(self, channel: Channel, buffer: bytearray | memoryview) -> asyncio.Future[None]:
        return self._inner.recv(channel, buffer)

    def abort(self) -> None:
        for pump in self._pumps.values():
            pump.cancel()
        for held in self._held.values():
            while held:
                end(held.popleft().done, PeerLost("the connection is closed"))
        self._inner.abort()

    @property
    def transports(self) -> tuple[str, ...]:
        return self._inner.transports

    async def _pump(self, channel: Channel) -> None:
        """Sends what is held up, in order, and ends when nothing is left."""
        held = self._held[channel]
        while held:
            first = held[0]
            await self._harm(channel, first)
            held.remove(first)
        del self._pumps[channel]

    async def _harm(self, channel: Channel, held: _Held) -> None:
        rule, message = held.rule, memoryview(held.message)
        match rule.fault if rule is not None else None:
            case None:
                self._post(channel, held, message)
            case Fault.DROP:
                held.done.set_result(None)
            case Fault.DELAY:
                assert rule is not None
                await asyncio.sleep(rule.seconds)
                self._post(channel, held, message)
            case Fault.DUPLICATE:
                self._inner.send(channel, bytes(message))
                self._post(channel, held, message)
            case Fault.REORDER:
                assert rule is not None
                await self._let_one_pass(channel, rule.seconds)
                self._post(channel, held, message)
            case Fault.CORRUPT:
                self._post(channel, held, self._corrupt(message))
            case Fault.TRUNCATE:
                self._post(channel, held, message[: self._plan.random.randrange(len(message))])
            case Fault.STALL:
                await asyncio.get_running_loop().create_future()
            case Fault.KILL:
                self._inner.abort()
                end(held.done, PeerLost("the connection is closed"))

    async def _let_one_pass(self, channel: Channel, seconds: float) -> None:
        held = self._held[channel]
        self._arrived[channel].clear()
        if len(held) < 2:
            try:
                await asyncio.wait_for(self._arrived[channel].wait(), seconds)
            except TimeoutError:
                return
        passing = held[1]
        del held[1]
        self._post(channel, passing, memoryview(passing.message))

    def _corrupt(self, message: memoryview) -> memoryview:
        harmed = bytearray(message)
        harmed[self._plan.random.randrange(len(harmed))] ^= 1 << self._plan.random.randrange(8)
        return memoryview(harmed)

    def _post(self, channel: Channel, held: _Held, message: memoryview) -> None:
        """The sender's buffer is the sender's again when its future is done, not before."""

        def over(sent: asyncio.Future[None]) -> None:
            if held.done.done():
                return
            if sent.cancelled() or sent.exception() is not None:
                end(held.done, PeerLost("the connection is closed"))
            else:
                held.done.set_result(None)

        if held.done.done():
            return
        self._inner.send(channel, message).add_done_callback(over)


class FaultyTransport(Transport):
    """See the module."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.plan = plan
        self._inner = inner

    async def connect(self, address: str, seconds: float) -> Endpoint:
        return self._around(await self._inner.connect(address, seconds))

    async def listen(self, address: str, on_endpoint: OnEndpoint) -> Listener:
        def on_inner(inner: Endpoint) -> None:
            on_endpoint(self._around(inner))

        return await self._inner.listen(address, on_inner)

    async def close(self) -> None:
        await self._inner.close()

    def _around(self, inner: Endpoint) -> Endpoint:
        return _FaultyEndpoint(inner, self.plan)
