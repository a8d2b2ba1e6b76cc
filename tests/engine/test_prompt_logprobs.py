"""Prompt logprobs of an engine: transformers', however chunked, batched, cached or preempted; each
told once, before the first token."""

from typing import Any

import pytest
import torch

from engine import prompt_logprobs
from engine.request import EngineRequest, PromptLogprobs, RequestId, TokenLogprobs, TokensOut
from tests.engine.conftest import TinyModel
from tests.engine.requests import make_request
from tests.engine.test_engine import PROMPTS, Rig, running

NUM_TOP = 3


def requests(max_tokens: int = 24, **changes: Any) -> list[EngineRequest]:
    return [
        make_request(
            f"{i}", prompt=prompt, max_tokens=max_tokens, num_prompt_logprobs=1 + NUM_TOP, **changes
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def told(rig: Rig, request_id: RequestId) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for event in rig.listener.of(PromptLogprobs, request_id):
        assert event.first_index == 1 + len(entries), "each once"
        entries += event.logprobs
    kinds = [type(event) for event in rig.listener.events(request_id)]
    if entries:
        last = max(i for i, kind in enumerate(kinds) if kind is PromptLogprobs)
        assert last < kinds.index(TokensOut)
    return entries


def check(rig: Rig, model: TinyModel) -> None:
    for request in requests():
        prompt = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            expected = model.reference(prompt).logits[0, :-1].log_softmax(-1)
        entries = told(rig, request.request_id)
        assert len(entries) == len(request.prompt_token_ids) - 1
        for row, token_id, entry in zip(expected, prompt[0, 1:].tolist(), entries, strict=True):
            assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
            assert entry.rank == 1 + (row > row[token_id]).sum()
            assert list(entry.top_token_ids) == row.topk(NUM_TOP).indices.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"token_budget": 7, "max_num_seqs": 4},
        {"block_size": 4, "num_blocks": 27},
        {"block_size": 4, "num_blocks": 27, "prefix_caching": False, "token_budget": 16},
    ],
)
def test_they_are_what_transformers_says(
    tiny_llama: TinyModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_A_TIME", 5)
    with running(tiny_llama.folder, **settings) as rig:
        outputs = rig.run(*requests())
        check(rig, tiny_llama)
        if "num_blocks" in settings:
            assert rig.engine.stats().preemptions > 0
    with running(tiny_llama.folder) as rig:
        plain = [make_request(f"{i}", prompt=p, max_tokens=24) for i, p in enumerate(PROMPTS)]
        assert rig.run(*plain) == outputs, "telling changes no token"


def test_a_cached_prefix_is_not_used_for_what_is_to_be_told(tiny_llama: TinyModel) -> None:
    with running(tiny_llama.folder, block_size=4) as rig:
        warm = [make_request(f"w{i}", prompt=p, max_tokens=1) for i, p in enumerate(PROMPTS)]
        rig.run(*warm)
        assert rig.engine.stats().blocks.cached > 0
        rig.run(*requests(max_tokens=1))
        check(rig, tiny_llama)
        assert rig.engine.stats().prompt_tokens_hit == 0


def test_nobody_asks_nobody_is_told(tiny_llama: TinyModel) -> None:
    with running(tiny_llama.folder) as rig:
        rig.run(make_request("r", prompt=PROMPTS[2]))
        assert not rig.listener.of(PromptLogprobs, RequestId("r"))
