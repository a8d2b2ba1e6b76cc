"""A worker in this process takes another role while it serves, and drains."""

import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest

from deploy import worker
from deploy.worker_config import WorkerConfig
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from runtime.call import DRAINING
from tests.ports import free_port

PATIENCE_S = 20.0
FREED_WITHIN_S = 2.0
BOTH = [pb.ROLE_PREFILL, pb.ROLE_DECODE]


class Client:
    """Speaks to the worker from a thread, for the worker has the main one."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.decode = pb_grpc.DecodeStub(self.channel)
        self.prefill = pb_grpc.PrefillStub(self.channel)
        self.duty = pb_grpc.DutyStub(self.channel)

    def status(self) -> pb.WorkerStatus:
        status: pb.WorkerStatus = self.decode.Status(
            pb.StatusRequest(), timeout=PATIENCE_S, wait_for_ready=True
        )
        return status

    def assign(self, *roles: pb.Role.ValueType, grace_s: float = 0.0) -> int:
        request = pb.AssignRequest(roles=roles, grace_ms=round(grace_s * 1000))
        reply: pb.AssignReply = self.duty.Assign(request, timeout=PATIENCE_S)
        return reply.num_leaving

    def prefill_one(self) -> int:
        """Token 0 of a prompt. Raises grpc.RpcError."""
        request = pb.PrefillRequest(
            request_id="p", prompt_token_ids=[17, 18], sampling=sampling(1), samples=[pb.Sample()]
        )
        events = [*self.prefill.Prefill(request, timeout=PATIENCE_S)]
        return int(next(one.first_token.token_id for one in events if one.HasField("first_token")))

    def generate(self, max_tokens: int) -> list[int]:
        """Raises Broken, with the tokens until then."""
        request = pb.GenerateRequest(
            request_id="d",
            prompt_token_ids=[17, 18],
            sampling=sampling(max_tokens),
            samples=[pb.Sample()],
            local_prefill=True,
        )
        token_ids: list[int] = []
        call = self.decode.Generate(request, timeout=PATIENCE_S)
        try:
            for event in call:
                token_ids += event.tokens.token_ids
        except grpc.RpcError:
            raise Broken(token_ids, call.code(), dict(call.trailing_metadata() or ())) from None
        return token_ids


class Broken(Exception):
    def __init__(self, token_ids: list[int], code: grpc.StatusCode, metadata: object) -> None:
        self.token_ids, self.code, self.metadata = token_ids, code, metadata


def sampling(max_tokens: int) -> pb.Sampling:
    return pb.Sampling(max_tokens=max_tokens, top_p=1, repetition_penalty=1, ignore_eos=True)


def flip_and_drain(client: Client) -> None:
    first = client.status()
    assert (list(first.serves), first.draining) == ([pb.ROLE_DECODE], False)
    expected = client.generate(4)
    with pytest.raises(grpc.RpcError, match="serves decode"):
        client.prefill_one()

    assert client.assign(*BOTH) == 0
    assert client.prefill_one() == expected[0]
    assert client.generate(4) == expected

    # Not served any more: a long answer ends within the grace, a short one in its own time.
    broken: list[Broken] = []

    def run_long() -> None:
        try:
            client.generate(1500)
        except Broken as failure:
            broken.append(failure)

    long = threading.Thread(target=run_long)
    long.start()
    while not client.status().num_running:
        time.sleep(0.01)
    assert client.assign(pb.ROLE_PREFILL, grace_s=0.1) == 1
    with pytest.raises(Broken):
        client.generate(4)
    assert client.prefill_one() == expected[0], "meanwhile"
    long.join()
    assert broken[0].code is grpc.StatusCode.UNAVAILABLE
    assert DRAINING in broken[0].metadata  # type: ignore[operator]
    assert broken[0].token_ids[:4] == expected

    client.assign()
    status = client.status()
    assert (list(status.serves), status.draining) == ([], True)
    deadline = time.monotonic() + FREED_WITHIN_S  # the client hears it before the engine's turn
    while client.status().num_running:
        assert time.monotonic() < deadline, "what was broken off still runs"
        time.sleep(0.01)
    client.assign(pb.ROLE_DECODE)
    assert client.generate(4) == expected
    assert client.status().generation == first.generation
    with pytest.raises(grpc.RpcError, match="none that a worker can serve"):
        client.duty.Assign(pb.AssignRequest(roles=[7]))  # type: ignore[list-item]


def test_roles_flip_and_the_worker_drains_while_it_serves(tiny_llama: Path) -> None:
    port = free_port()
    failures: list[BaseException] = []

    def drive() -> None:
        client = Client(port)
        try:
            flip_and_drain(client)
        except BaseException as failure:  # noqa: BLE001 (raised below, in the test's own thread)
            failures.append(failure)
        finally:
            client.channel.close()
            os.kill(os.getpid(), signal.SIGTERM)

    driving = threading.Thread(target=drive)
    driving.start()
    worker.run(
        WorkerConfig(
            role="decode",
            model_path=str(tiny_llama),
            grpc_port=port,
            fabric_listen="inproc://duty",
            num_blocks=128,
            fabric_floor=0,
            drain_grace_s=1.0,
            dtype="float32",
        )
    )
    driving.join()
    if failures:
        raise failures[0]
