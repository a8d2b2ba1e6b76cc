"""A prompt that takes long to be tokenized holds up nobody but itself."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from router.tokenizer import TextTokenizer
from tests.router.conftest import ANSWER, StartRouter
from tests.router.fake_workers import fake_cluster, until


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_others_are_answered_meanwhile(
    start_router: StartRouter,
    tokenizer: TextTokenizer,
    answer: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
) -> None:
    may_end, encode = threading.Event(), TextTokenizer._encode
    num_waiting = 0

    def slow_encode(self: TextTokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        nonlocal num_waiting
        if "long" in text:
            num_waiting += 1
            assert may_end.wait(30)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "_encode", slow_encode)
    asked: dict[str, object] = (
        {"prompt": "long"}
        if endpoint == "complete"
        else {"messages": [{"role": "user", "content": "long"}]}
    )
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        path = "/v1/completions" if endpoint == "complete" else "/v1/chat/completions"
        slow = asyncio.create_task(router.post(path, **asked, max_tokens=50))
        try:
            await until(lambda: num_waiting == 1, timeout_s=20)
            for stream in (True, False):
                assert (await router.complete(stream=stream)).status_code == 200
            assert not slow.done()
        finally:
            may_end.set()
        assert ANSWER in (await slow).text
