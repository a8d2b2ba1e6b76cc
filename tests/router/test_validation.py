"""Bodies to valid requests: limits, defaults, and numbers in refusals."""

from collections.abc import Iterator

import pytest

from router.chat_style import ChatStyle
from router.errors import BadRequest, ModelNotFound
from router.grammar_check import GrammarCheck
from router.request import RequestId, ValidRequest
from router.schemas import ChatBody, CompletionBody
from router.tokenizer import TextTokenizer
from router.validation import Validator

ID = RequestId("r")
MAX_MODEL_LEN = 100


@pytest.fixture
def validator(tokenizer: TextTokenizer) -> Iterator[Validator]:
    async def max_model_len() -> int:
        return MAX_MODEL_LEN

    check = GrammarCheck(tokenizer.vocabulary)
    style = ChatStyle(tokenizer)
    yield Validator(tokenizer, style, "tiny", check, max_prompts=3, max_model_len=max_model_len)
    check.close()
    style.close()


async def complete(validator: Validator, **body: object) -> ValidRequest:
    return await validator.completion(ID, CompletionBody.parse({"model": "tiny", **body}))


async def test_a_chat_may_use_the_whole_context(validator: Validator) -> None:
    messages = [{"role": "developer", "content": "Hi"}]
    body = ChatBody.parse({"model": "tiny", "messages": messages})
    request = await validator.chat(ID, body)
    (prompt,) = request.prompts
    assert prompt.sampling.max_tokens == MAX_MODEL_LEN - len(prompt.token_ids)


async def test_a_completion_has_openais_default_if_that_fits(validator: Validator) -> None:
    request = await complete(validator, prompt=[[5], [5] * 95])
    assert [prompt.sampling.max_tokens for prompt in request.prompts] == [16, 5]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [([5] * 100, None, ("100", "101")), ([5] * 90, 11, ("100", "90", "11", "101"))],
)
async def test_what_cannot_fit_is_told_with_the_numbers(
    validator: Validator, prompt: list[int], max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(BadRequest) as refusal:
        await complete(validator, prompt=prompt, max_tokens=max_tokens)
    assert refusal.value.code == "context_length_exceeded"
    assert all(number in refusal.value.message for number in numbers)


async def test_what_just_fits_is_taken(validator: Validator) -> None:
    request = await complete(validator, prompt=[5] * 90, max_tokens=10)
    assert request.prompts[0].sampling.max_tokens == 10


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", "b", "c", "d"], [5, 1 << 20]])
async def test_prompts_that_are_none(validator: Validator, prompt: object) -> None:
    with pytest.raises(BadRequest) as refusal:
        await complete(validator, prompt=prompt)
    assert refusal.value.param == "prompt"


async def test_seeds(validator: Validator) -> None:
    drawn = await complete(validator, prompt=["a", "a"])
    assert drawn.prompts[0].sampling.seed != drawn.prompts[1].sampling.seed
    negative = await complete(validator, prompt="a", seed=-1)
    assert negative.prompts[0].sampling.seed == (1 << 64) - 1


async def test_the_rest_is_carried_over(validator: Validator) -> None:
    request = await complete(
        validator, prompt="a", stop="x", top_k=-1, stop_token_ids=[3], ignore_eos=True, stream=True
    )
    assert request.stop == ("x",)
    assert request.is_streaming
    sampling = request.prompts[0].sampling
    assert (sampling.top_k, sampling.stop_token_ids, sampling.ignore_eos) == (0, (3,), True)


async def test_another_model_is_not_here(validator: Validator) -> None:
    body = CompletionBody.parse({"model": "gpt-4", "prompt": "a"})
    with pytest.raises(ModelNotFound):
        await validator.completion(ID, body)


async def test_two_words_for_one_limit(validator: Validator) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    both = {"max_tokens": 1, "max_completion_tokens": 2}
    body = ChatBody.parse({"model": "tiny", "messages": messages, **both})
    with pytest.raises(BadRequest):
        await validator.chat(ID, body)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"allowed_token_ids": [1, 320]}, "allowed_token_ids"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
async def test_refusals_that_need_the_tokenizer(
    validator: Validator, change: dict[str, object], param: str
) -> None:
    with pytest.raises(BadRequest) as refusal:
        await complete(validator, prompt="a", **change)
    assert refusal.value.param == param
    assert any(number in refusal.value.message for number in ("320", "5", "16"))


async def test_bad_words_are_banned_with_and_without_a_space(
    validator: Validator, tokenizer: TextTokenizer
) -> None:
    request = await complete(validator, prompt="a", bad_words=["Paris", " relay baton"])
    words = request.prompts[0].sampling.bad_words
    texts = ["Paris", " Paris", "relay baton", " relay baton"]
    assert words == tuple(tokenizer.encode_bare(text) for text in texts)
    assert max(map(len, words)) > 1


async def test_how_tokens_are_chosen_is_carried_over(validator: Validator) -> None:
    request = await complete(
        validator,
        prompt="a",
        presence_penalty=1,
        logit_bias={"7": -100, "8": 1.5},
        allowed_token_ids=[3, 9, 3],
        min_tokens=2,
    )
    sampling = request.prompts[0].sampling
    assert sampling.presence_penalty == 1
    assert sampling.logit_bias == ((7, -100), (8, 1.5))
    assert sampling.allowed_token_ids == (3, 9)
    assert sampling.min_tokens == 2
