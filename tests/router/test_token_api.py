"""Text to tokens and back over HTTP."""

import pytest

from router.tokenizer import TextTokenizer
from tests.router.conftest import StartRouter
from tests.router.fake_workers import MAX_MODEL_LEN, fake_cluster

TEXT = "Größe <|im_end|> 🌍"
MESSAGES = [{"role": "user", "content": "Capital of France?"}]


async def test_a_text_and_back(start_router: StartRouter, tokenizer: TextTokenizer) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        reply = (await router.post("/tokenize", prompt=TEXT, return_token_strs=True)).json()
        assert tuple(reply["tokens"]) == tokenizer.encode(TEXT)
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        assert reply["max_model_len"] == MAX_MODEL_LEN
        assert "<|im_end|>" in reply["token_strs"]
        back = await router.http.post("/detokenize", json={"tokens": reply["tokens"]})
        assert back.json() == {"prompt": TEXT}


async def test_a_chat_is_what_its_answer_would_compute(start_router: StartRouter) -> None:
    async with fake_cluster((5,)) as cluster, start_router(cluster) as router:
        reply = (await router.post("/tokenize", messages=MESSAGES)).json()
        await router.chat(messages=MESSAGES)
        assert reply["tokens"] == list(cluster.decodes[0].requests[0].prompt_token_ids)
        bare = await router.post("/tokenize", messages=MESSAGES, add_generation_prompt=False)
        assert reply["tokens"][: bare.json()["count"]] == bare.json()["tokens"]
        assert bare.json()["count"] < reply["count"]
        tool = {"type": "function", "function": {"name": "f"}}
        told = await router.post("/tokenize", messages=MESSAGES, tools=[tool])
        assert told.json()["count"] > reply["count"]


async def test_a_final_message_goes_on(start_router: StartRouter) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    async with fake_cluster((5,)) as cluster, start_router(cluster) as router:
        reply = await router.post("/tokenize", messages=messages, continue_final_message=True)
        back = await router.http.post("/detokenize", json={"tokens": reply.json()["tokens"]})
        assert back.json()["prompt"].endswith("<|im_start|>assistant\nIt is")
        both = {"continue_final_message": True, "add_generation_prompt": True}
        response = await router.chat(messages=messages, **both)
        assert response.json()["error"]["param"] == "continue_final_message"
        await router.chat(messages=messages, continue_final_message=True)
        assert list(cluster.decodes[0].requests[0].prompt_token_ids) == reply.json()["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, 400, "x"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1 << 20]}, 400, "tokens"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
    ],
)
async def test_refusals(
    start_router: StartRouter, path: str, body: dict[str, object], status: int, param: str
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        response = await router.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_version(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        reply = (await router.http.get("/version")).raise_for_status().json()
        assert list(reply) == ["version"]
        assert reply["version"]
