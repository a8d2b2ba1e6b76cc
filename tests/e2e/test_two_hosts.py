"""A prefill worker on a host of its own: in another network namespace, behind a virtual wire. Where
that is not allowed, the test is skipped and says why.
"""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from engine.config import ModelConfig
from tests.e2e.cluster import MODEL_NAME, Cluster
from tests.e2e.reference import Reference
from tests.e2e.slow_relay import prompt_of
from tests.e2e.tokens import token_client

HERE, THERE = "198.18.7.1", "198.18.7.2"
"""Of the range that is kept for tests of networks."""
WIRE, FAR_WIRE, FAR_HOST = "baton-here", "baton-there", "baton-far"
NUM_OUTPUTS = 8
LENGTHS = (1, 17, 300)
ONLY_TCP = {"UCX_TLS": "tcp"}
"""Memory of this machine could be shared between the namespaces; between hosts it cannot."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def take_down() -> None:
    subprocess.run(["ip", "netns", "del", FAR_HOST], capture_output=True, timeout=10)
    subprocess.run(["ip", "link", "del", WIRE], capture_output=True, timeout=10)


@pytest.fixture
def far_host() -> Iterator[tuple[str, ...]]:
    """What a command begins with that is to run there."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here to make network namespaces with")
    take_down()
    try:
        ip("netns", "add", FAR_HOST)
        ip("link", "add", WIRE, "type", "veth", "peer", "name", FAR_WIRE, "netns", FAR_HOST)
        ip("addr", "add", f"{HERE}/30", "dev", WIRE)
        ip("link", "set", WIRE, "up")
        for words in (
            ("addr", "add", f"{THERE}/30", "dev", FAR_WIRE),
            ("link", "set", FAR_WIRE, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", FAR_HOST, *words)
    except subprocess.CalledProcessError as error:
        take_down()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield ("ip", "netns", "exec", FAR_HOST)
    take_down()


@dataclass
class TwoHosts:
    cluster: Cluster
    expected: Reference
    token_nbytes: int


@pytest.fixture
def hosts(far_host: tuple[str, ...], tiny_llama: Path, tmp_path: Path) -> Iterator[TwoHosts]:
    cluster = Cluster(tmp_path, tiny_llama, dtype="float32", num_blocks=100, max_model_len=400)
    cluster.worker_environ = ONLY_TCP
    try:
        cluster.worker("prefill", far_host, host=THERE, advertise_host=THERE, cores=0)
        cluster.worker("decode", host=HERE, advertise_host=HERE, cores=1)
        cluster.router()
        cluster.wait_ready()
        nbytes = ModelConfig.from_folder(tiny_llama).kv_token_nbytes(torch.float32)
        yield TwoHosts(cluster, Reference(tiny_llama, NUM_OUTPUTS), nbytes)
    finally:
        cluster.close()


def wire_nbytes() -> int:
    """That came over it so far."""
    return int(Path(f"/sys/class/net/{WIRE}/statistics/rx_bytes").read_text())


@pytest.mark.long
async def test_kv_goes_from_host_to_host(hosts: TwoHosts) -> None:
    """By TCP, over the wire; the tokens are transformers', and decode computes no prompt."""
    cluster = hosts.cluster
    prefill, decode = cluster.workers
    before, nbytes_before = decode.metrics(), wire_nbytes()
    async with token_client([prefill], [decode]) as client:
        for length in LENGTHS:
            prompt = prompt_of(length, length)
            assert await client.generate(prompt, NUM_OUTPUTS) == hosts.expected(prompt)
        assert client.retries("prefill") == client.retries("decode") == 0
    after = decode.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("baton_prompt_tokens_total", source="computed") == 0
    kv_nbytes = sum(LENGTHS) * hosts.token_nbytes
    assert grown("baton_handoff_bytes_total", direction="received") == kv_nbytes
    assert wire_nbytes() - nbytes_before >= kv_nbytes
    body = {"model": MODEL_NAME, "prompt": prompt_of(9, 100), "max_tokens": 4, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=20) as http:
        response = await http.post("/v1/completions", json=body)
        told = (await http.get(f"/v1/requests/{response.headers['x-baton-request-id']}")).json()
    (leg,) = told["prompts"][0]["attempts"][0]["prefills"]
    assert leg["kv"]["transports"] == ["tcp"]
    cluster.assert_all_back()
