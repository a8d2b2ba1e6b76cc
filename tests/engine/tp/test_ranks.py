"""What becomes of an engine when one of its ranks does not do as the others."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.batch import BatchInput, PackedBatch
from engine.config import ModelError
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.errors import EngineStopped
from engine.request import RequestFailed, RequestId, TokensOut
from engine.tp import rank
from engine.tp.channel import Kind, Message
from engine.tp.rank import Rank
from engine.tp.ranks import ConnectedRanks, NoRanks, RankLost
from engine.tp.shard import Shard
from tests.engine.conftest import TinyModel
from tests.engine.listener import Listener
from tests.engine.requests import make_request
from tests.engine.tp.threaded_ranks import other_ranks

DEADLINE_S = 10.0
AT_ONCE_S = 2.0
R = RequestId("r")


@pytest.fixture
def config(tiny_llama: TinyModel) -> EngineConfig:
    return EngineConfig(
        tiny_llama.folder,
        device="cpu",
        dtype="float32",
        num_blocks=64,
        max_model_len=512,
        num_threads=1,
        nice=0,
        shard=Shard(0, 2),
    )


@contextmanager
def failing_ranks(
    config: EngineConfig, kind: type[Exception], reason: str
) -> Iterator[ConnectedRanks | NoRanks]:
    """Ranks of which one fails so, sooner or later."""
    with pytest.raises(kind, match=reason), other_ranks(config) as ranks:
        yield ranks


def wait_failed(engine: Engine) -> None:
    deadline = time.monotonic() + AT_ONCE_S
    while engine.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_rank_that_fails_in_a_step_fails_the_engine_with_its_reason(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    do = Rank._do

    def break_down(self: Rank, message: Message) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise ValueError("device lost")
        do(self, message)

    monkeypatch.setattr(Rank, "_do", break_down)
    listener = Listener()
    with failing_ranks(config, ValueError, "device lost") as ranks:
        engine = Engine(config, listener, ranks=ranks)
        engine.start()
        engine.submit(make_request(max_tokens=400))
        listener.wait_for(TokensOut, R, 4)
        wait_failed(engine)
        (failed,) = [listener.wait_for(RequestFailed, R)]
        assert "rank 1 failed: device lost" in failed.error
        assert isinstance(engine.failure, RankLost)
        with pytest.raises(EngineStopped):
            engine.submit(make_request("late"))
        engine.stop()


def test_a_rank_that_is_lost_ends_an_idle_engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_ranks(config) as ranks:
        engine = Engine(config, ranks=ranks)
        engine.start()
        assert isinstance(ranks, ConnectedRanks)
        ranks._channels[0].shut()  # as if its process was gone
        wait_failed(engine)
        assert str(engine.failure) == "rank 1 ended"
        with pytest.raises(RankLost, match="rank 1 ended"):
            ranks.check()
        engine.stop()


def test_a_rank_that_cannot_load_says_why(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("no such tensor")

    monkeypatch.setattr(rank, "load_decoder", refuse)
    with (
        pytest.raises(ModelError, match="no such tensor"),
        other_ranks(config) as ranks,
        pytest.raises(RankLost, match="rank 1 failed: no such tensor"),
    ):
        Engine(config, ranks=ranks)


def test_ranks_that_read_other_weights_are_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Rank.__init__

    def other_digest(self: Rank, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        self.digest = bytes(32)

    def join_nobody(self: object) -> None:
        """Rank 0 never comes."""

    monkeypatch.setattr(Rank, "__init__", other_digest)
    monkeypatch.setattr("engine.tp.collectives.TorchCollectives.join", join_nobody)
    with other_ranks(config) as ranks, pytest.raises(ModelError, match="files changed"):
        Engine(config, ranks=ranks)


def test_an_engine_that_stops_tells_its_ranks_and_waits_for_them(config: EngineConfig) -> None:
    with other_ranks(config) as ranks:
        engine = Engine(config, ranks=ranks)
        engine.start()
        assert isinstance(ranks, ConnectedRanks)
        begin = time.monotonic()
        engine.stop()
        assert time.monotonic() - begin < AT_ONCE_S
        assert engine.failure is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            ranks._channels[0].send(Kind.CLOSE)


def test_ranks_do_not_wait_for_a_rank_0_that_broke_in_a_step(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is in a collective by then."""
    to = PackedBatch.to

    def break_down(self: PackedBatch, device: torch.device) -> BatchInput:
        if threading.current_thread().name == "engine":
            raise ValueError("rank 0 broke")
        return to(self, device)

    monkeypatch.setattr(PackedBatch, "to", break_down)
    listener = Listener()
    with failing_ranks(config, RuntimeError, "closed by peer") as ranks:
        engine = Engine(config, listener, ranks=ranks)
        engine.start()
        engine.submit(make_request())
        wait_failed(engine)
        engine.stop()
    assert listener.wait_for(RequestFailed, R).error == "ValueError('rank 0 broke')"
