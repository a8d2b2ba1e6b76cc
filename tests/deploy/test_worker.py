"""A worker process as a whole, as far as it shows without another one."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from deploy import worker
from deploy.worker_config import WorkerConfig
from engine.model_runner import ModelRunner
from engine.sequence import Sequence
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc

LATE_S = 20.0


@pytest.fixture
def late() -> Iterator[threading.Event]:
    """Set, with a SIGTERM that ends the worker in this process, if it has not ended by itself."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(LATE_S, end)
    timer.start()
    yield is_late
    timer.cancel()
    timer.join()


def test_an_engine_that_fails_ends_the_process(
    tiny_llama: Path,
    unused_tcp_port: int,
    late: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would go on saying that it serves, and refuse whatever comes."""

    def break_down(self: ModelRunner, seqs: list[Sequence]) -> list[int]:
        raise ValueError("device lost")

    errors: list[grpc.StatusCode] = []

    def ask() -> None:
        request = pb.GenerateRequest(
            request_id="r",
            prompt_token_ids=[17, 18],
            sampling=pb.Sampling(max_tokens=4, top_p=1, repetition_penalty=1),
            samples=[pb.Sample()],
            local_prefill=True,
        )
        with grpc.insecure_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
            stream = pb_grpc.DecodeStub(channel).Generate(
                request, timeout=LATE_S, wait_for_ready=True
            )
            try:
                list(stream)
            except grpc.RpcError as error:
                errors.append(error.code())

    monkeypatch.setattr(ModelRunner, "run", break_down)
    client = threading.Thread(target=ask)
    client.start()
    config = WorkerConfig(
        role="decode",
        model_path=str(tiny_llama),
        grpc_port=unused_tcp_port,
        fabric_listen="inproc://worker",
        num_blocks=8,
        probe_s=0,  # else the engine fails before it serves
    )
    with pytest.raises(SystemExit) as end:
        worker.run(config)
    client.join()
    assert end.value.code == 1
    assert not late.is_set()
    assert errors == [grpc.StatusCode.INTERNAL]
