"""Flags of `baton up` become the flags of the processes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy import plan
from deploy.plan import BadPlan, Model, Plan, UpConfig

MODEL = Model("/models/tiny", "tiny")


def made(config: UpConfig, environ: Mapping[str, str] | None = None) -> Plan:
    token = Path("admin-token")
    return plan.make(config, MODEL, lambda name: Path(f"{name}.log"), environ or {}, token)


def value(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_router_knows_the_workers_addresses() -> None:
    *workers, router = made(UpConfig(prefill=2, decode=2)).specs
    ports = [a.rpartition(":")[2] for w in workers for a in w.addresses.values()]
    assert len(set(ports)) == 8
    for worker in workers:
        assert value(worker.argv, "--grpc-port") in worker.addresses["grpc"]
        assert worker.addresses["grpc"] in value(router.argv, f"--{worker.role}")
    assert value(router.argv, "--admin-port") in router.addresses["admin"]
    assert router.addresses["admin"] not in ports
    assert value(router.argv, "--admin-token-file") == "admin-token"


def test_workers_of_both_roles_are_known_for_both() -> None:
    config = UpConfig(prefill=0, decode=1, both=2)
    decode, *both, router = made(config).specs
    assert [worker.name for worker in both] == ["both-0", "both-1"]
    assert all(value(worker.argv, "--role") == "both" for worker in both)
    addresses = [worker.addresses["grpc"] for worker in both]
    assert value(router.argv, "--prefill").split(",") == addresses
    assert value(router.argv, "--decode").split(",") == [decode.addresses["grpc"], *addresses]


def test_the_users_own_flags_come_last() -> None:
    config = UpConfig(worker_args="--block-size 32", decode_args="--block-size 64")
    prefill, decode, _ = made(config).specs
    assert prefill.argv[-2:] == ("--block-size", "32")
    assert decode.argv[-4:] == ("--block-size", "32", "--block-size", "64")


def test_who_computes_prompts_beside_streams_may_take_longer_for_a_step() -> None:
    name = "BATON_TPOT_SLO_MS"
    assert all(name not in spec.environ for spec in made(UpConfig()).specs)
    colocated = UpConfig(mode="colocated")
    assert made(colocated).specs[0].environ[name] == "90"
    assert made(colocated, {name: "50"}).specs[0].environ[name] == "50"


def test_children_do_not_inherit_what_was_meant_for_up() -> None:
    environ = {"BATON_PREFILL": "2", "BATON_TOKEN_BUDGET": "64", "PYTHONPATH": "/x", "HOME": "/h"}
    child = plan.child_environ(environ)
    assert "BATON_PREFILL" not in child
    assert child["BATON_TOKEN_BUDGET"] == "64"
    assert child["PYTHONPATH"].endswith(":/x")


def test_every_worker_has_its_gpu() -> None:
    specs = made(UpConfig(device="cuda"), {"CUDA_VISIBLE_DEVICES": "4,5"}).specs
    assert [spec.environ["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4", "5", "4,5"]
    assert all("--cores" not in spec.argv for spec in specs)


def test_either_role_has_its_own_number_of_ranks() -> None:
    config = UpConfig(tensor_parallel=2, decode_tensor_parallel=1, cores="none")
    prefill, decode, _ = made(config).specs
    assert value(prefill.argv, "--tensor-parallel") == "2"
    assert value(decode.argv, "--tensor-parallel") == "1"
    on_gpus = UpConfig(device="cuda", prefill_tensor_parallel=2)
    prefill, decode, _ = made(on_gpus, {"CUDA_VISIBLE_DEVICES": "4,5,6"}).specs
    assert prefill.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert decode.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_wildcard_hosts_are_reached_on_loopback() -> None:
    assert made(UpConfig(host="0.0.0.0", port=8001)).url == "http://127.0.0.1:8001"
    assert made(UpConfig(host="::1", port=8001)).url == "http://[::1]:8001"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (UpConfig(decode=0, port=0), "--decode"),
        (UpConfig(prefill=0, port=0), "--mode colocated"),
        (UpConfig(prefill=-1, both=1), "--both"),
        (UpConfig(both=1, mode="colocated"), "--both"),
        (UpConfig(host="203.0.113.1"), "203.0.113.1"),
        (UpConfig(port=0), "--port 0"),
        (UpConfig(port=1 << 16), "--port 65536"),
        (UpConfig(prefill_args="--name 'p"), "--prefill-args"),
        (UpConfig(decode_tensor_parallel=0), "--tensor-parallel"),
    ],
)
def test_what_cannot_be_is_said_at_once(config: UpConfig, complaint: str) -> None:
    with pytest.raises(BadPlan, match=complaint):
        plan.check(config)
