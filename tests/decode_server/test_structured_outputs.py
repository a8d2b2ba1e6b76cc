"""Structured outputs through both services: token 0 is held to the grammar on prefill, the rest on
decode, and whoever takes over goes on where the tokens so far have come."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.kv_copier import Encoded, KVCopier
from kvfabric.errors import FabricError
from protos import serving_pb2 as pb
from runtime.grammar import of_regex
from tests.decode_server.test_leg import ticket
from tests.grammars import FORMS, Form
from tests.relay import DecodeEvents, Worker, eventually, run_prefill, running_leg, started_worker
from tests.text_model import END, text_vocabulary

PROMPT = [(7 * i + i * i) % 300 for i in range(150)]  # three chunks of 64
MAX_TOKENS = 120
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 9}]


@dataclass
class Relay:
    """No run finds what another has left in a cache."""

    prefill: Worker
    decode: Worker

    async def colocated(self, **sampling: Any) -> list[int]:
        leg = self.decode.decode_leg(
            PROMPT, MAX_TOKENS, local=True, cache_salt=token_hex(), **sampling
        )
        with running_leg(leg) as (events, task):
            await task
        return events.token_ids

    async def disaggregated(
        self, outputs: Sequence[int] = (), **sampling: Any
    ) -> tuple[list[int], DecodeEvents]:
        """The whole answer, and what decode said of it."""
        sampling["cache_salt"] = token_hex()
        leg = self.decode.decode_leg(PROMPT, MAX_TOKENS, outputs, **sampling)
        with running_leg(leg) as (events, task):
            said = await run_prefill(
                self.prefill.prefill_leg(
                    PROMPT, MAX_TOKENS, await ticket(events), outputs, **sampling
                )
            )
            first = [event.first_token.token_id for event in said if event.HasField("first_token")]
            if said[0].first_token.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
                await task
        assert bool(first) == (not outputs)
        return [*outputs, *(events.token_ids or first)], events


@pytest.fixture
async def relay(text_model: Path) -> AsyncIterator[Relay]:
    vocabulary = text_vocabulary(text_model)
    with (
        started_worker(text_model, vocabulary=vocabulary) as prefill,
        started_worker(text_model, vocabulary=vocabulary) as decode,
    ):
        yield Relay(prefill, decode)
        await prefill.assert_all_back()
        await decode.assert_all_back()


@pytest.fixture(scope="module")
def tokenizer(text_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(text_model / "tokenizer.json"))


def asked(form: Form, sampling: dict[str, Any]) -> dict[str, Any]:
    return {"grammar": form.grammar, "ignore_eos": False, **sampling}


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
async def test_disaggregated_is_colocated_and_fits(
    relay: Relay, tokenizer: Tokenizer, form: Form, sampling: dict[str, Any]
) -> None:
    params = asked(form, sampling)
    expected = await relay.colocated(**params)
    computed = relay.decode.engine.stats().prompt_tokens_computed
    token_ids, events = await relay.disaggregated(**params)
    assert relay.decode.engine.stats().prompt_tokens_computed == computed
    assert token_ids == expected
    if expected[-1] == END:
        form.check(tokenizer.decode(expected))
        assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    else:
        assert len(expected) == MAX_TOKENS
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
        assert not form.is_bounded


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
async def test_resumed_on_another_pair_behind_any_prefix(
    relay: Relay, text_model: Path, form: Form
) -> None:
    """Decode is lost after so many tokens: the next pair gets them with the same grammar."""
    params = asked(form, SAMPLING[1])
    whole, _ = await relay.disaggregated(**params)
    vocabulary = text_vocabulary(text_model)
    with (
        started_worker(text_model, vocabulary=vocabulary) as prefill,
        started_worker(text_model, vocabulary=vocabulary) as decode,
    ):
        other = Relay(prefill, decode)
        for length in sorted({1, 2, len(whole) // 2, len(whole) - 1} - {0, len(whole)}):
            resumed, _ = await other.disaggregated(whole[:length], **params)
            assert resumed == whole


async def test_resumed_behind_the_end_it_only_finishes(relay: Relay) -> None:
    """Also where `ignore_eos` asked for more: the grammar had come to its end."""
    params = {"grammar": FORMS[3].grammar, "ignore_eos": True, **SAMPLING[1]}
    whole = await relay.colocated(**params)
    assert whole[-1] == END
    leg = relay.decode.decode_leg(PROMPT, MAX_TOKENS, whole, **params)
    with running_leg(leg) as (events, task):
        await task
    (event,) = events
    assert event.finished.reason == pb.FINISH_REASON_STOP


async def test_a_prefill_leg_that_is_lost_costs_another_one(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first frame: the others wait until it is given up."""
    pack, packed, is_lost = KVCopier._pack, count(), threading.Event()

    def held_up(self: KVCopier, *frame: object) -> Encoded:
        if next(packed):
            is_lost.wait(10)
        return pack(self, *frame)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCopier, "_pack", held_up)
    params = asked(FORMS[0], SAMPLING[1])
    leg = relay.decode.decode_leg(PROMPT, MAX_TOKENS, **params)
    with running_leg(leg) as (events, task):
        lost = await ticket(events)
        prefill = asyncio.create_task(
            run_prefill(relay.prefill.prefill_leg(PROMPT, MAX_TOKENS, lost, **params))
        )
        await eventually(lambda: relay.decode.fabric.stats().received_frames >= 1)
        leg.renew(lost.transfer_id)
        second = await ticket(events, 1)
        is_lost.set()
        await asyncio.gather(prefill, return_exceptions=True)
        assert isinstance(prefill.exception(), FabricError)
        await run_prefill(relay.prefill.prefill_leg(PROMPT, MAX_TOKENS, second, **params))
        await task
    assert events.token_ids == await relay.colocated(**params)


async def test_preempted_on_decode_they_go_on_where_they_were(text_model: Path) -> None:
    vocabulary = text_vocabulary(text_model)
    with (
        started_worker(text_model, vocabulary=vocabulary) as prefill,
        started_worker(text_model, vocabulary=vocabulary, num_blocks=22) as decode,
    ):
        relay = Relay(prefill, decode)
        params = [
            {"grammar": of_regex(f"[{first}-z]{{90}}"), "ignore_eos": False, **SAMPLING[1]}
            for first in "ab"
        ]
        expected = [await relay.colocated(**each) for each in params]
        before = decode.engine.stats().preemptions
        together = await asyncio.gather(*(relay.disaggregated(**each) for each in params))
        assert decode.engine.stats().preemptions > before
        assert [token_ids for token_ids, _ in together] == expected
        await prefill.assert_all_back()
        await decode.assert_all_back()


async def test_a_grammar_that_does_not_compile_holds_nothing_on_either_side(relay: Relay) -> None:
    params: dict[str, Any] = {"grammar": of_regex("(a")}
    leg = relay.decode.decode_leg(PROMPT, MAX_TOKENS, **params)
    with running_leg(leg) as (_, task), pytest.raises(InvalidRequest, match="unclosed"):
        await task
    with pytest.raises(InvalidRequest, match="unclosed"):
        await run_prefill(relay.prefill.prefill_leg(PROMPT, MAX_TOKENS, None, **params))


@pytest.mark.parametrize(
    "form",
    [form for form in FORMS if form.name != "ebnf"],  # all samples give it the same answer
    ids=lambda form: form.name,
)
async def test_each_sample_has_a_state_of_its_own(relay: Relay, form: Form) -> None:
    """Three samples that are at different places in one grammar."""
    params = asked(form, SAMPLING[1])
    alone = [await relay.colocated(sample=sample, **params) for sample in range(3)]
    assert len(set(map(tuple, alone))) > 1
    params |= {"cache_salt": token_hex(), "others": [(), ()]}
    with running_leg(relay.decode.decode_leg(PROMPT, MAX_TOKENS, **params)) as (events, task):
        leg = relay.prefill.prefill_leg(PROMPT, MAX_TOKENS, await ticket(events), **params)
        await run_prefill(leg)
        await task
    assert [events.tokens_of(sample) for sample in range(3)] == alone
