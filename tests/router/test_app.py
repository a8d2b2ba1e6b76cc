"""The HTTP face against fake workers: both endpoints, streaming and not, and what is refused."""

from collections.abc import Sequence

from tests.router.conftest import ANSWER, StartRouter
from tests.router.fake_workers import fake_cluster


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def test_a_chat_is_answered(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.chat()

        assert response.status_code == 200, response.text
        body = response.json()
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len(answer)
        assert router.metric("baton_requests_total", outcome="completed") == 1
        assert not cluster.decodes[0].requests[0].local_prefill
        assert response.headers["x-baton-request-id"] in body["id"]
