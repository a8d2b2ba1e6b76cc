"""Structured outputs of one engine: a random model's nonsense fits the grammar, in any batch,
preempted or resumed."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.request import FinishReason, RequestId
from router.tokenizer import TextTokenizer
from runtime.grammar import of_choices, of_json_schema, of_regex
from tests.engine.grammar_rig import PROMPT, Start, may_come, starting
from tests.grammars import FORMS, SCHEMA, Form
from tests.text_model import END, VOCAB_SIZE, text_vocabulary

SAMPLING = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]


@pytest.fixture
def start(text_model: Path) -> Iterator[Start]:
    with starting(text_model) as start:
        yield start


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_nonsense_fits_every_form(start: Start, form: Form) -> None:
    rig = start()
    requests = [
        rig.request(f"{index}/{seed}", form.grammar, temperature=temperature, seed=seed)
        for index, temperature in enumerate((0.0, 1.0, 2.0))
        for seed in range(5)
    ]
    outputs = rig.run(*requests)
    reasons = [rig.finish_reason(request) for request in requests]
    for token_ids, reason in zip(outputs, reasons, strict=True):
        if reason is FinishReason.STOP:
            assert token_ids[-1] == END
            form.check(rig.text(token_ids))
    if form.is_bounded:
        assert set(reasons) == {FinishReason.STOP}


def test_router_and_engine_do_without_a_token_that_is_too_long(
    text_model: Path, tmp_path: Path
) -> None:
    """Both read the folder and live; what one compiles the other obeys."""
    folder = shutil.copytree(text_model, tmp_path / "model")
    file, long_id = folder / "tokenizer.json", VOCAB_SIZE - 1
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {
        "a" * 3000 if token_id == long_id else name: token_id for name, token_id in vocab.items()
    }
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    grammar = of_regex("a{1,6000}")
    vocabulary = TextTokenizer.from_folder(folder).vocabulary
    assert vocabulary is not None
    assert long_id not in may_come(vocabulary.compile(grammar))
    with starting(folder) as start:
        rig = start()
        request = rig.request("bound", grammar, logit_bias=((long_id, 100.0),), max_tokens=30)
        (outputs,) = rig.run(request)
        assert long_id not in outputs
        assert re.fullmatch("a+", rig.text(outputs))


def test_some_unbounded_outputs_end_and_those_cut_off_are_beginnings(start: Start) -> None:
    rig = start()
    form = next(form for form in FORMS if form.name == "ebnf")
    requests = [
        rig.request(str(seed), form.grammar, temperature=1.5, seed=seed, max_tokens=3)
        for seed in range(20)
    ]
    outputs = rig.run(*requests)
    reasons = [rig.finish_reason(request) for request in requests]
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH}
    for token_ids, reason in zip(outputs, reasons, strict=True):
        if reason is FinishReason.LENGTH:
            grammar = text_vocabulary(rig.engine.config.model_path).compile(form.grammar)
            grammar.advance(token_ids)
            assert not grammar.may_end or len(token_ids) == 3


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_neighbours_without_a_grammar_say_what_they_say_alone(
    start: Start, sampling: dict[str, float]
) -> None:
    rig = start()
    free = [
        replace(
            rig.request(f"free-{index}", "", max_tokens=40, ignore_eos=True, **sampling),
            prompt_token_ids=PROMPT[index:],
        )
        for index in range(4)
    ]
    alone = [rig.run(request)[0] for request in free]
    bound = [rig.request(f"bound-{form.name}", form.grammar, **sampling) for form in FORMS]
    bound_alone = [rig.run(request)[0] for request in bound]
    again = [
        replace(request, request_id=RequestId(f"{request.request_id}-again"))
        for pair in zip(free, bound, strict=False)
        for request in pair
    ]
    together = rig.run(*again)
    assert together[0::2] == alone
    assert together[1::2] == bound_alone[:4]


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_preempted_in_the_middle_it_goes_on_where_it_was(
    start: Start, sampling: dict[str, float]
) -> None:
    grammars = [of_json_schema(SCHEMA, {"whitespace_pattern": " "}), *(f.grammar for f in FORMS)]
    wide, narrow = start(), start(num_blocks=8, block_size=16)
    requests = [
        wide.request(str(index), grammar, max_tokens=90, **sampling)
        for index, grammar in enumerate(grammars)
    ]
    expected = wide.run(*requests)
    assert narrow.run(*requests) == expected
    assert narrow.engine.stats().preemptions > 0


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seeded"])
def test_resumed_behind_any_prefix_it_says_the_same(
    start: Start, sampling: dict[str, float]
) -> None:
    rig = start()
    for form in FORMS:
        (whole,) = rig.run(rig.request(form.name, form.grammar, max_tokens=30, **sampling))
        resumed = [
            rig.request(
                f"{form.name}-{length}",
                form.grammar,
                max_tokens=30,
                outputs=whole[:length],
                **sampling,
            )
            for length in range(1, len(whole))
        ]
        for length, rest in enumerate(rig.run(*resumed), 1):
            assert whole[:length] + rest == whole


def test_where_the_grammar_must_end_it_ends_whatever_the_request_says(start: Start) -> None:
    rig = start()
    grammar = of_choices(["ab"])
    asked: dict[str, dict[str, object]] = {
        "ignore_eos": {"ignore_eos": True},
        "min_tokens": {"min_tokens": 50},
        "biased": {"logit_bias": ((END, -100.0),)},
        "not allowed": {"allowed_token_ids": (5, 6)},
    }
    for name, changes in asked.items():
        request = rig.request(name, grammar, **changes)
        (token_ids,) = rig.run(request)
        assert rig.finish_reason(request) is FinishReason.STOP
        assert rig.text(token_ids) == "ab"


def test_where_the_grammar_may_end_min_tokens_and_ignore_eos_go_before(start: Start) -> None:
    rig = start()
    grammar = of_regex("[a-z]{0,30}")
    asked: list[dict[str, object]] = [{"min_tokens": 8}, {"ignore_eos": True}]
    requests = [
        rig.request(f"{index}-{seed}", grammar, temperature=3.0, seed=seed, **changes)
        for index, changes in enumerate(asked)
        for seed in range(8)
    ]
    outputs = rig.run(*requests)
    assert all(len(token_ids) >= 8 for token_ids in outputs[:8])
    assert all(len(rig.text(token_ids)) == 30 for token_ids in outputs[8:])


def test_a_stop_token_comes_only_where_the_output_is_whole(start: Start) -> None:
    """However much the model wants to say it."""
    rig = start()
    vocabulary = text_vocabulary(rig.engine.config.model_path)
    (x,) = may_come(vocabulary.compile(of_choices(["x"])))
    special = 0  # <|im_start|>
    requests = [
        rig.request(
            str(stop),
            of_regex("x?[a-w]x?y{3}x?"),
            stop_token_ids=frozenset({stop}),
            logit_bias=((stop, 100.0),),
        )
        for stop in (x, special)
    ]
    with_x, with_special = rig.run(*requests)
    assert rig.finish_reason(requests[0]) is rig.finish_reason(requests[1]) is FinishReason.STOP
    assert with_x[-1] == x
    assert re.fullmatch("[a-w]y{3}x", rig.text(with_x))
    assert with_special[-1] == special
    assert re.fullmatch("x?[a-w]x?y{3}", rig.text(with_special))
