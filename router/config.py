"""What the router is told at its start; parsed once, in `__main__`, and never written again."""

from dataclasses import dataclass
from typing import Literal

from router.grammar_bounds import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
from router.limits import MAX_LOGPROBS, MAX_STOPS, Limits
from runtime.flags import flag, nbytes, up_to


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    model_path: str = flag(
        help="folder with tokenizer.json, tokenizer_config.json and config.json; the same model "
        "as the workers serve (the folder that `python -m engine.prepare` prints)"
    )
    served_model_name: str = flag(help='the name clients put into "model"')
    decode: tuple[str, ...] = flag(
        (), help="decode workers: host:port,host:port", metavar="ADDRESSES"
    )
    prefill: tuple[str, ...] = flag(
        (), help="prefill workers: host:port,host:port", metavar="ADDRESSES"
    )
    mode: Literal["disaggregated", "colocated"] = flag(
        "disaggregated",
        help="disaggregated: prompts are computed on prefill workers and their KV handed over; "
        "colocated: decode workers compute prompts too",
    )
    prefill_at: Literal["auto", "remote", "local"] = flag(
        "auto",
        help="where a prompt is computed when there is a choice: auto is where it is predicted to "
        "cost least, remote on a prefill worker, local on the decode worker",
    )
    session_affinity: Literal["off", "soft", "hard"] = flag(
        "soft",
        help="whether requests of a session (header x-session-id, or user) go to the same workers: "
        "soft while that costs no more than computing the prompt, hard within a bound of load",
    )
    slo_ttft_ms: float = flag(
        0.0,
        help="workers that are predicted to meet this time to the first token come first; 0: "
        "no objective. The header x-slo-ttft-ms and a key's slo_ttft_ms say so for their requests",
    )
    slo_tpot_ms: float = flag(
        0.0, help="the same for the time per output token after the first; 0: no objective"
    )
    api_keys_file: str = flag(
        "",
        metavar="FILE",
        help="API keys, a line each as `baton keys` prints it; read again when it changes. Without "
        "it and the next flag everybody may ask",
    )
    api_keys: str = flag("", metavar="LINES", help="the same lines themselves, with ; between")
    early_rejection: bool = flag(
        True,
        help="whether requests that would miss their objective because of load are refused with "
        "429 before anything is computed for them",
    )
    host: str = flag("127.0.0.1", help="address to listen on")
    port: int = flag(8000, help="port to listen on")
    tls_cert: str = flag("", metavar="FILE", help="PEM; with the two below: mutual TLS on gRPC")
    tls_key: str = flag("", metavar="FILE", help="PEM, its key, without a password")
    tls_ca: str = flag("", metavar="FILE", help="PEM, the authority that signs every process")

    http_tls_cert: str = flag(
        "", metavar="FILE", help="PEM; with the next: HTTPS for clients, and no HTTP"
    )
    http_tls_key: str = flag("", metavar="FILE", help="PEM, its key, without a password")
    cors_origin: tuple[str, ...] = flag(
        (),
        metavar="ORIGINS",
        help="web pages that may use the endpoint from a browser: https://host,https://host; * is "
        "all, none is the default",
    )

    admin_port: int = flag(
        0, help="port of the admin API, by which workers join, drain and change roles; 0: none"
    )
    admin_host: str = flag("127.0.0.1", help="address that the admin API listens on")
    admin_token_file: str = flag(
        "", metavar="FILE", help="what is in it must come with each request to the admin API"
    )

    max_attempts: int = flag(
        6, help="attempts at a prompt in a row that fail without a new token, before it is given up"
    )
    retry_ratio: float = flag(
        0.2, help="retries that each prompt allows, of whichever prompt; with the reserve beside"
    )
    retry_reserve_per_s: float = flag(
        10.0,
        help="retries a second that are allowed however few prompts come, saved for ten seconds; "
        "beyond it a prompt that fails before its first token is refused with 503",
    )
    request_timeout_s: float = flag(600.0, help="time for a whole request")
    inactivity_s: float = flag(
        10.0, help="a worker's stream that is silent for this long is given up"
    )
    ready_wait_s: float = flag(
        10.0, help="how long a request waits for a worker when none is ready"
    )
    resume_wait_s: float = flag(
        60.0, help="the same, where the client has tokens and would lose its answer"
    )
    queue_wait_s: float = flag(
        30.0,
        help="how long a request waits for a worker with room, and while the queues of all prefill "
        "workers are full (see their --max-queue-ms), in all, before it is refused with 429",
    )
    max_queue: int = flag(
        1024, help="requests that wait in the router for room; beyond it some get 429 at once"
    )
    ahead_ms: float = flag(
        2000.0,
        help="a prefill worker with more work than this, and more than a few prompts, gets no more "
        "until it has less: they wait in the router, where tenants take turns",
    )
    status_interval_s: float = flag(
        0.5, help="pause before a worker that could not be reached is tried again"
    )
    status_timeout_s: float = flag(
        3.0,
        help="a worker that has not told its state for this long takes no requests, and streams of "
        "it that are as silent are given up",
    )
    renew_timeout_s: float = flag(3.0, help="time for asking a decode worker for another ticket")
    head_timeout_s: float = flag(30.0, help="time for a client to send the head of a request")
    body_timeout_s: float = flag(30.0, help="time for a client to send the body of a request")
    send_timeout_s: float = flag(30.0, help="a client that takes nothing for this long is left")
    shutdown_grace_s: float = flag(
        3.0, help="time open requests have to end after SIGTERM; then they get an error"
    )

    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = flag(
        "auto",
        help="how the model writes calls of tools; auto is read off its chat template, and hermes "
        "if that knows no tools; none: tools are refused",
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"] = flag(
        "auto",
        help="whether the model thinks between <think> and </think> before it answers: qwen3 where "
        "it or its prompt opens the tag, deepseek_r1 always, auto is qwen3 if its chat template "
        "knows the tags; none: what it thinks is part of the answer",
    )

    max_body_nbytes: int = flag(4 << 20, help="largest request body", parse=nbytes, metavar="SIZE")
    max_prompts: int = flag(64, help="prompts in one completion request")
    max_messages: int = flag(2048, help="messages in one chat request")
    max_stops: int = flag(
        MAX_STOPS, help=f"stop strings in one request, up to {MAX_STOPS}", parse=up_to(MAX_STOPS)
    )
    max_logprobs: int = flag(
        MAX_LOGPROBS,
        help=f"logprobs of other tokens at each place, up to {MAX_LOGPROBS}",
        parse=up_to(MAX_LOGPROBS),
    )
    max_schema_nbytes: int = flag(
        MAX_SCHEMA_CHARS,
        help=f"JSON schema of a request, up to {MAX_SCHEMA_CHARS >> 10}KiB",
        parse=up_to(MAX_SCHEMA_CHARS, nbytes),
        metavar="SIZE",
    )
    max_schema_depth: int = flag(
        MAX_SCHEMA_DEPTH,
        help=f"how deep a JSON schema may nest, up to {MAX_SCHEMA_DEPTH}",
        parse=up_to(MAX_SCHEMA_DEPTH),
    )

    explain_requests: int = flag(
        256,
        help="requests that GET /v1/requests/ID can explain, the last ones; 0: none. No prompt and "
        "no answer is kept",
    )

    max_viewers: int = flag(
        32, help="connections that may watch the cluster, as the page does; 0: none"
    )

    ledger_interval_s: float = flag(
        15.0, help="pause between two looks at whose the workers' blocks and slots are; 0: none"
    )
    ledger_grace_s: float = flag(
        10.0, help="an owner there that is no request of this router is an orphan after this long"
    )

    log_format: Literal["text", "json"] = flag("text", help="how log lines look")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", help="what is logged")

    @property
    def is_colocated(self) -> bool:
        return self.mode == "colocated"

    @property
    def is_local(self) -> bool:
        """Decode workers compute all prompts."""
        return self.is_colocated or self.prefill_at == "local"

    @property
    def limits(self) -> Limits:
        return Limits(
            max_prompts=self.max_prompts,
            max_messages=self.max_messages,
            max_stops=self.max_stops,
            max_logprobs=self.max_logprobs,
            max_schema_nbytes=self.max_schema_nbytes,
            max_schema_depth=self.max_schema_depth,
        )
