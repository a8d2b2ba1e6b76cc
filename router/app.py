"""The router's HTTP face: OpenAI's endpoints, health and metrics.

`build_app` wires everything; the app's lifespan owns the channels to the workers. A request takes
this way: exchange → schemas → validation → generation → dispatch, and back through answer.
"""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers

from router.admin_server import admin_server
from router.admission import Admission
from router.answer import answer
from router.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    TextCompletionChunk,
)
from router.chat_format import ChatFormat
from router.chat_style import ChatStyle
from router.cluster_api import ClusterWatch, add_cluster
from router.cluster_reader import ClusterReader
from router.config import RouterConfig
from router.cors import add_cors
from router.dispatch import Dispatcher
from router.error_answers import add_error_answers
from router.exchange import Exchange, Reply
from router.fleet import Fleet
from router.gate import Gate, grant_of
from router.generation import generate
from router.grammar_check import GrammarCheck
from router.ledger import LedgerWatch
from router.metrics import RouterMetrics
from router.objective import TPOT_HEADER, TTFT_HEADER, wish_of
from router.openapi import Posted, Posts, add_document
from router.operations_api import add_models, add_operations
from router.page import add_page
from router.pins import PinBoard
from router.pins_api import PrefixReader
from router.posting import add_posts
from router.record import Records, RequestRecord
from router.request import ValidRequest
from router.request_id import RequestIds, request_id_of
from router.requests_api import add_requests
from router.responses import Format, TextFormat
from router.schemas import ChatBody, CompletionBody
from router.token_api import DetokenizeBody, Detokenized, TokenApi, TokenizeBody, Tokenized
from router.tokenizer import JSONObject, TextTokenizer
from router.validation import Validator
from router.workers import WorkerSet
from runtime.tls import TLS

SESSION_HEADER = "x-session-id"
MAX_SESSION = 256
"""Characters of it that count."""

POSTS: Posts = {
    "/v1/chat/completions": Posted(ChatBody, ChatCompletion, ChatCompletionChunk),
    "/v1/completions": Posted(CompletionBody, TextCompletion, TextCompletionChunk),
    "/tokenize": Posted(TokenizeBody, Tokenized),
    "/detokenize": Posted(DetokenizeBody, Detokenized),
}

Work = Callable[[RequestRecord, JSONObject, Reply], Coroutine[Any, Any, None]]


class Router:
    """What the endpoints share. Made inside the running loop, as channels belong to it."""

    def __init__(
        self, config: RouterConfig, tokenizer: TextTokenizer, registry: CollectorRegistry
    ) -> None:
        self.config = config
        self.workers = WorkerSet(
            config.decode,
            config.prefill if config.mode == "disaggregated" else (),
            interval_s=config.status_interval_s,
            timeout_s=config.status_timeout_s,
            max_idle_s=config.inactivity_s,
            tls=TLS.from_files(config.tls_cert, config.tls_key, config.tls_ca),
        )
        self.pins = PinBoard(self.workers)
        self._tokenizer = tokenizer
        self._metrics = RouterMetrics(registry, self.workers)
        self.dispatcher = Dispatcher(self.workers, config, self._metrics)
        self.admission = Admission(config, self.workers, self.dispatcher.placer, registry)
        self.records = Records(config.explain_requests)
        self.ledger = LedgerWatch(
            self.workers,
            self.dispatcher.live,
            registry,
            interval_s=config.ledger_interval_s,
            timeout_s=config.status_timeout_s,
            grace_s=config.ledger_grace_s,
        )
        self.cluster = ClusterWatch.over(
            ClusterReader(
                config.served_model_name,
                config.mode,
                self.workers,
                self.admission,
                self.dispatcher,
                self.records,
                self._metrics.recent,
            ),
            max_viewers=config.max_viewers,
            send_timeout_s=config.send_timeout_s,
        )
        self.grammars = GrammarCheck(tokenizer.vocabulary)
        self._limits = config.limits
        self.style = ChatStyle(tokenizer, config.tool_call_parser, config.reasoning_parser)
        name, max_model_len = config.served_model_name, self.dispatcher.max_model_len
        self.tokens = TokenApi(tokenizer, self.style, name, max_model_len)
        self.validator = Validator(
            tokenizer,
            self.style,
            config.served_model_name,
            self.grammars,
            max_prompts=config.max_prompts,
            max_model_len=max_model_len,
        )

    async def chat(self, record: RequestRecord, body: JSONObject, reply: Reply) -> None:
        self._limits.check(body)
        request_id = record.request_id
        request = await self.validator.chat(request_id, ChatBody.parse(body), record.session)
        form = ChatFormat(request, self.config.served_model_name, self._tokenizer.token_bytes)
        await self._answer(record, request, form, reply)

    async def completion(self, record: RequestRecord, body: JSONObject, reply: Reply) -> None:
        self._limits.check(body)
        request_id = record.request_id
        request = await self.validator.completion(
            request_id, CompletionBody.parse(body), record.session
        )
        form = TextFormat(request, self.config.served_model_name, self._tokenizer.token_bytes)
        await self._answer(record, request, form, reply)

    def exchange(self, work: Work, request: Request) -> Exchange:
        record = self.records.open(request_id_of(request.scope), request.url.path)
        record.session = request.headers.get(SESSION_HEADER, "")[:MAX_SESSION]
        record.grant = grant_of(request.scope)
        return Exchange(
            partial(self._enter, work, record, request.headers),
            self._metrics,
            record,
            max_body_nbytes=self.config.max_body_nbytes,
            body_timeout_s=self.config.body_timeout_s,
            send_timeout_s=self.config.send_timeout_s,
        )

    async def _enter(
        self, work: Work, record: RequestRecord, headers: Headers, body: JSONObject, reply: Reply
    ) -> None:
        with self.admission.entering(record.grant):
            record.wish = wish_of(headers.getlist(TTFT_HEADER), headers.getlist(TPOT_HEADER))
            await work(record, body, reply)

    async def _answer(
        self, record: RequestRecord, request: ValidRequest, form: Format, reply: Reply
    ) -> None:
        record.validated(request, self.config.served_model_name)
        async with self.admission.admitted(record, request) as let_in:
            pieces = generate(let_in, self.dispatcher, self._tokenizer, self._metrics, record)
            await answer(let_in, pieces, form, reply)


def build_app(
    config: RouterConfig, tokenizer: TextTokenizer, registry: CollectorRegistry
) -> FastAPI:
    """`app.state.router` is the `Router`, while the app runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        router = app.state.router = Router(config, tokenizer, registry)
        admin = admin_server(
            config, Fleet(router.workers), router.pins, PrefixReader(router.validator)
        )
        router.workers.start()
        router.ledger.start()
        router.admission.start()
        if admin is not None:
            admin.start()
        try:
            yield
        finally:
            if admin is not None:
                await admin.close()
            router.dispatcher.stop()
            router.grammars.close()
            router.style.close()
            await router.admission.close()
            await router.ledger.close()
            await router.pins.close()
            await router.workers.close()

    app = FastAPI(
        lifespan=lifespan, title="Baton", docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_exchanges(app)
    app.add_middleware(Gate)
    add_cors(app, config.cors_origin)
    app.add_middleware(RequestIds)
    add_error_answers(app)
    add_models(app, config.served_model_name)
    add_operations(
        app,
        registry,
        lambda request: _router_of(request).dispatcher.is_ready,
        lambda request: _router_of(request).ledger.read(),
    )
    add_requests(app, lambda request: _router_of(request).records.of(grant_of(request.scope)))
    add_cluster(app, lambda request: _router_of(request).cluster)
    add_document(app, POSTS, config.served_model_name, config.limits)
    add_page(app)
    return app


def _router_of(request: Request) -> Router:
    router = request.app.state.router
    assert isinstance(router, Router)
    return router


def _add_exchanges(app: FastAPI) -> None:
    def chat(request: Request) -> Exchange:
        router = _router_of(request)
        return router.exchange(router.chat, request)

    def completion(request: Request) -> Exchange:
        router = _router_of(request)
        return router.exchange(router.completion, request)

    def tokenize(request: Request) -> Exchange:
        router = _router_of(request)
        return router.exchange(router.tokens.tokenize, request)

    def detokenize(request: Request) -> Exchange:
        router = _router_of(request)
        return router.exchange(router.tokens.detokenize, request)

    endpoints = {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    add_posts(app, endpoints, {path: posted.answer for path, posted in POSTS.items()})
