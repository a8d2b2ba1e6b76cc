"""The test that must never break: in float32, tokens by prefill + transfer + decode are the tokens
of one engine and of transformers' `generate`; between real processes, over UCX.

Every case also asserts from the metrics that decode computed no prompt token and that the KV bytes
it received are what the formula says: a silent local prefill is a failure.
"""

import asyncio

import pytest

from tests.e2e.equivalence.relay import (
    BLOCK,
    CHUNK,
    LONGEST,
    NUM_OUTPUTS,
    Relay,
)
from tests.e2e.reference import prompts_of
from tests.e2e.tokens import token_client

LENGTHS = (
    *(1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1),
    *(2 * CHUNK, 3 * CHUNK + 5, 4 * CHUNK, LONGEST),
)
PAIRS = [(16, 16), (16, 64), (64, 16)]


@pytest.mark.parametrize(("prefill_block", "decode_block"), PAIRS)
async def test_relayed_tokens_are_those_of_transformers(
    relay: Relay, prefill_block: int, decode_block: int
) -> None:
    """All lengths at once, so that prompts batch and their transfers interleave. The same prompts
    for each pair, which share no cached KV: transformers takes longest to say what is right."""
    prefill = relay.workers["prefill", prefill_block]
    decode = relay.workers["decode", decode_block]
    prompts, salt = prompts_of(LENGTHS, seed=256), f"{prefill_block} to {decode_block}"
    before = decode.metrics()
    async with token_client([prefill], [decode]) as client:
        answers = await asyncio.gather(
            *(client.generate(prompt, NUM_OUTPUTS, cache_salt=salt) for prompt in prompts)
        )
        assert client.retries("prefill") == client.retries("decode") == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == relay.expected(prompt), f"a prompt of {len(prompt)} tokens"
    after = decode.metrics()
    assert after.value("baton_prompt_tokens_total", source="computed") == before.value(
        "baton_prompt_tokens_total", source="computed"
    )
    received = after.value("baton_prompt_tokens_total", source="received") - before.value(
        "baton_prompt_tokens_total", source="received"
    )
    nbytes = after.value("baton_handoff_bytes_total", direction="received") - before.value(
        "baton_handoff_bytes_total", direction="received"
    )
    assert received == sum(LENGTHS)
    assert nbytes == sum(LENGTHS) * relay.token_nbytes
    assert after.value("baton_fabric_transport", transport="cma") == (not relay.is_by_ucx)
    relay.cluster.assert_all_back()


async def test_alone_is_batched_is_one_engine(relay: Relay) -> None:
    """Greedy and sampled: one prompt at a time, all at once, and colocated give equal tokens."""
    prefill, decode = relay.workers["prefill", 16], relay.workers["decode", 64]
    prompts = prompts_of((1, BLOCK, CHUNK + 1, 300), seed=7)
    sampled = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}

    async with token_client([prefill], [decode]) as client:
        alone = [
            await client.generate(prompt, NUM_OUTPUTS, seed=seed, **sampled)  # type: ignore[arg-type]
            for seed, prompt in enumerate(prompts)
        ]
        batched = await asyncio.gather(
            *(
                client.generate(prompt, NUM_OUTPUTS, seed=seed, **sampled)  # type: ignore[arg-type]
                for seed, prompt in enumerate(prompts)
            )
        )
        greedy = [await client.generate(prompt, NUM_OUTPUTS) for prompt in prompts]
        other_seed = await client.generate(prompts[-1], NUM_OUTPUTS, seed=99, **sampled)  # type: ignore[arg-type]
    async with token_client([], [decode], mode="colocated") as client:
        colocated = await asyncio.gather(
            *(
                client.generate(prompt, NUM_OUTPUTS, seed=seed, **sampled)  # type: ignore[arg-type]
                for seed, prompt in enumerate(prompts)
            )
        )
    assert alone == list(batched) == list(colocated)
    assert greedy == [relay.expected(prompt) for prompt in prompts]
    assert other_seed != alone[-1], "the seed decides"
    assert decode.metrics().value("baton_local_prefills_total", reason="colocated") >= 4
    relay.cluster.assert_all_back()


@pytest.mark.parametrize(("prefill_block", "decode_block"), PAIRS)
async def test_prefixes_are_neither_computed_nor_sent_again(
    relay: Relay, prefill_block: int, decode_block: int
) -> None:
    """Each worker keeps what it has seen, by its own block size; the ticket asks for the rest. A
    prompt that decode has whole takes no handoff: that is counted, not silent."""
    prefill = relay.workers["prefill", prefill_block]
    decode = relay.workers["decode", decode_block]
    body, tail, other = prompts_of((300, 40, 90), seed=1000)
    salt = f"{prefill_block} to {decode_block}"
    kept_prefill = 300 // prefill_block * prefill_block
    kept_decode = 300 // decode_block * decode_block
    whole = (340 - 1) // decode_block * decode_block
    before, prefill_before = decode.metrics(), prefill.metrics()
    async with token_client([prefill], [decode]) as client:
        for prompt in (body + tail, body + other, body + tail):
            answer = await client.generate(prompt, NUM_OUTPUTS, cache_salt=salt)
            assert answer == relay.expected(prompt)
    after, prefill_after = decode.metrics(), prefill.metrics()
    missing = 390 - kept_decode

    def grown(source: str) -> float:
        name = "baton_prompt_tokens_total"
        return after.value(name, source=source) - before.value(name, source=source)

    assert grown("received") == 340 + missing
    assert grown("prefix_hit") == kept_decode + whole
    assert grown("computed") == 340 - whole
    nbytes = after.value("baton_handoff_bytes_total", direction="received") - before.value(
        "baton_handoff_bytes_total", direction="received"
    )
    assert nbytes == (340 + missing) * relay.token_nbytes
    computed = prefill_after.value("baton_prompt_tokens_total", source="computed")
    computed -= prefill_before.value("baton_prompt_tokens_total", source="computed")
    assert computed == 340 + 390 - kept_prefill
    full_hits = after.value("baton_local_prefills_total", reason="prefix_hit")
    assert full_hits == before.value("baton_local_prefills_total", reason="prefix_hit") + 1
    relay.cluster.assert_all_back()


async def test_one_token_needs_no_handoff(relay: Relay) -> None:
    prefill, decode = relay.workers["prefill", 16], relay.workers["decode", 16]
    (prompt,) = prompts_of((200,), seed=3)
    before = decode.metrics()
    async with token_client([prefill], [decode]) as client:
        answer = await client.generate(prompt, 1)
    assert answer == relay.expected(prompt)[:1]
    name = "baton_handoff_bytes_total"
    assert decode.metrics().value(name, direction="received") == before.value(
        name, direction="received"
    )
    relay.cluster.assert_all_back()


@pytest.mark.parametrize(("prefill_block", "decode_block"), PAIRS[1:])
async def test_n_samples_take_one_prefill_and_one_transfer(
    relay: Relay, prefill_block: int, decode_block: int
) -> None:
    """Greedy ones are transformers'; drawn ones are those of a colocated engine, and differ."""
    prefill = relay.workers["prefill", prefill_block]
    decode = relay.workers["decode", decode_block]
    lengths = (BLOCK - 1, 64, CHUNK + 1)
    prompts = prompts_of(lengths, seed=40 + prefill_block)
    hot = {"temperature": 1.0, "seed": 5}
    before, prefill_before = decode.metrics(), prefill.metrics()
    async with token_client([prefill], [decode]) as client:
        drawn = [await client.samples(prompt, NUM_OUTPUTS, 4, **hot) for prompt in prompts]
    after, prefill_after = decode.metrics(), prefill.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("baton_handoff_bytes_total", direction="received") == (
        sum(lengths) * relay.token_nbytes
    )
    assert grown("baton_prompt_tokens_total", source="received") == sum(lengths)
    assert grown("baton_prompt_tokens_total", source="computed") == 0
    assert grown("baton_handoff_stage_seconds_count", stage="attach") == len(lengths)
    computed = prefill_after.value("baton_prompt_tokens_total", source="computed")
    computed -= prefill_before.value("baton_prompt_tokens_total", source="computed")
    assert computed == sum(lengths)
    async with token_client([], [decode], mode="colocated") as client:
        assert [await client.samples(p, NUM_OUTPUTS, 4, **hot) for p in prompts] == drawn
        greedy = await client.samples(prompts[-1], NUM_OUTPUTS, 3, temperature=0.0, seed=0)
    assert greedy == [relay.expected(prompts[-1])] * 3
    assert all(len(set(map(tuple, samples))) > 1 for samples in drawn)
    relay.cluster.assert_all_back()
