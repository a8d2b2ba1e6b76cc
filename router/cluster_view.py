"""What `GET /v1/cluster` says, and in parts `GET /v1/cluster/events` (docs/page.md): the cluster as
this router knows it. No prompt, no answer, no token id.

Times called `_ms` of a moment are on the router's own clock since it started; a null is not there,
or not yet. router/cluster_reader.py fills these in.
"""

from typing import Literal

from pydantic import BaseModel

from router.explanation import Brief


class Blocks(BaseModel):
    """Of a worker's KV pool; they add up to `num_blocks`."""

    free: int
    cached: int
    """Nobody's, with KV that a prompt may find again."""
    pinned: int
    """As the cached ones, but never evicted."""
    promised: int
    held: int
    in_flight: int
    """Let go by a sequence while a copy is under way."""


class WorkerView(BaseModel):
    """One service of one worker process: one that serves both roles is there twice."""

    name: str
    address: str
    role: Literal["prefill", "decode"]
    generation: str
    """Of the process, in hexadecimal: another one is another process."""
    ready: bool
    problem: str | None
    """Why it takes no requests; null: it does."""
    draining: bool
    num_waiting: int
    num_running: int
    num_awaiting_kv: int
    queue_ms: int
    """What a prompt that came now would wait for others, predicted."""
    num_blocks: int
    block_size: int
    kv_token_nbytes: int
    blocks: Blocks
    num_transfers: int
    """Expected or being sent."""
    send_slots_used: int
    recv_slots_used: int
    """Frames under way."""


class Handoff(BaseModel):
    """KV on its way from a prefill worker to a decode worker, or just arrived."""

    id: str
    """Its own, not the request's."""
    prefill: str
    decode: str
    """Names."""
    state: Literal["computing", "shipping", "done", "ended"]
    """`computing`: token 0 is not here yet, though KV of chunks may move; `ended`: not well."""
    outcome: str | None
    num_tokens: int
    """Of the prompt whose KV was asked for."""
    nbytes: int | None
    """Moved, as the worker told at the end."""
    begin_ms: float
    end_ms: float | None


class Cluster(BaseModel):
    model: str
    mode: Literal["disaggregated", "colocated"]
    ready: bool
    """A prompt could be served as the mode promises."""
    started_at: float
    """This router, in seconds since 1970."""
    num_prompts: int
    """That this router has; those that wait in its line among them."""
    num_in_line: int
    """In this router, for their turn or because all prefill queues are full."""
    workers: list[WorkerView]
    handoffs: list[Handoff]
    """Those under way, and those of the last seconds."""


class RequestLine(Brief):
    read_ms: float | None
    """Since it arrived, as the next."""
    end_ms: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_failures: int
    """Calls to workers that failed."""


class Percentiles(BaseModel):
    """Each is off by 1 % at most; null where nothing was measured."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    p50_series_ms: list[float | None]
    """Of each bucket of the window, the oldest first."""
    p95_series_ms: list[float | None]


class Latency(BaseModel):
    window_s: int
    bucket_s: int
    ttft: Percentiles
    tpot: Percentiles


class ClusterView(BaseModel):
    object: Literal["cluster"] = "cluster"
    cluster: Cluster
    requests: list[RequestLine]
    """The newest first."""
    latency: Latency
