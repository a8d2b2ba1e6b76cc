"""What goes wrong with a grammar is its request's alone; nobody waits for one but its sample."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits

import runtime.grammar
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.errors import EngineStopped, InvalidRequest
from engine.request import EngineRequest, FinishReason, Leg, RequestId, SamplingParams, TokensOut
from engine.sample_grammar import SampleGrammar
from runtime.grammar import of_choices, of_json_schema, of_regex
from tests.engine.grammar_rig import PROMPT, Start, may_come, starting
from tests.engine.loop_rig import wait_until
from tests.grammars import FORMS
from tests.text_model import text_vocabulary


@pytest.fixture
def start(text_model: Path) -> Iterator[Start]:
    with starting(text_model) as start:
        yield start


@pytest.mark.parametrize(
    "grammar", [of_regex("(a"), of_json_schema({"type": "strin"}, {}), "nonsense", "{}"]
)
def test_a_grammar_that_does_not_compile_fails_its_request_alone(
    start: Start, grammar: str
) -> None:
    rig = start()
    bad, good = rig.request("bad", grammar), rig.request("good", FORMS[2].grammar)
    rig.engine.submit(bad)
    rig.run(good)
    assert rig.finish_reason(bad) is None
    (failed,) = rig.failure(bad)
    assert isinstance(failed.exception(), InvalidRequest)
    wait_until(lambda: rig.engine.stats().blocks.held == 0)


def test_outputs_that_do_not_fit_fail_their_request_alone(start: Start) -> None:
    rig = start()
    bad = rig.request("bad", FORMS[3].grammar, outputs=(0,))
    rig.engine.submit(bad)
    assert rig.finish_reason(bad) is None
    assert "does not fit" in rig.failure(bad)[0].error


def test_a_grammar_that_runs_dry_fails_its_request_alone(start: Start) -> None:
    rig = start()
    bomb = rig.request("bomb", of_regex("b(a{1000}){1000}"))
    bound = rig.request("bound", FORMS[0].grammar)
    free = rig.request("free", "", ignore_eos=True, max_tokens=60)
    expected = rig.run(bound, free)
    rig.engine.submit(bomb)
    names = [replace(r, request_id=RequestId(f"{r.request_id}-again")) for r in (bound, free)]
    assert rig.run(*names) == expected
    assert rig.finish_reason(bomb) is None
    (failed,) = rig.failure(bomb)
    assert isinstance(failed.exception(), InvalidRequest)
    assert "cannot go on after" in failed.error
    wait_until(lambda: rig.engine.stats().blocks.held == 0)


def test_requests_with_equal_grammars_do_not_use_up_each_others_limits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes some 200 states of its lexer."""
    monkeypatch.setattr(runtime.grammar, "_LIMITS", LLParserLimits(max_lexer_states=1000))
    rig = start(max_num_seqs=32, num_blocks=512)
    grammar = of_regex("[a-z ]*[aeiou][a-z ]{100}")
    requests = [
        rig.request(str(seed), grammar, temperature=1.0, seed=seed, max_tokens=60)
        for seed in range(32)
    ]
    rig.run(*requests)


def test_a_stop_token_alone_may_leave_nothing(text_model: Path) -> None:
    vocabulary = text_vocabulary(text_model)
    grammar = vocabulary.compile(of_regex("x[0-9]"))
    (x,) = may_come(vocabulary.compile(of_choices(["x"])))
    params = SamplingParams(max_tokens=5, stop_token_ids=frozenset({x}))
    sample = SampleGrammar(grammar, params)
    words = np.empty(vocabulary.row_size, dtype=np.int32)
    sample.fill([], words)
    assert sample.failure == "the grammar cannot go on after 0 tokens: no token may come next"
    assert words.all()  # the sampler must have something to choose from


def test_the_last_prompt_token_waits_for_the_grammar(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else does: neither the engine nor its neighbours."""
    rig = start()
    held: list[Callable[[], None]] = []
    prepare = rig.engine._grammars.prepare
    monkeypatch.setattr(
        rig.engine._grammars,
        "prepare",
        lambda request, on_ready: held.append(lambda: prepare(request, on_ready)),
    )
    bound = rig.request("bound", FORMS[3].grammar)
    rig.engine.submit(bound)
    rig.run(rig.request("free", "", ignore_eos=True, max_tokens=20))
    assert not rig.listener.of(TokensOut, bound.request_id)
    assert rig.engine.stats().running == 1
    (release,) = held
    release()
    assert rig.finish_reason(bound) is FinishReason.STOP


def test_an_aborted_request_hears_nothing_of_its_grammar(start: Start) -> None:
    rig = start()
    for index in range(20):
        request = rig.request(str(index), of_regex("(a"))
        rig.engine.submit(request)
        rig.engine.abort(request.request_id)
    rig.run(rig.request("last", FORMS[3].grammar))


def test_without_a_vocabulary_a_grammar_is_refused_at_once(text_model: Path) -> None:
    engine = Engine(EngineConfig(text_model, device="cpu", num_blocks=8))
    sampling = SamplingParams(max_tokens=4, grammar=FORMS[0].grammar)
    request = EngineRequest(RequestId("r"), Leg.LOCAL, PROMPT, sampling)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        engine.submit(request)
    engine.stop()


def test_a_stopped_engine_takes_no_grammar(start: Start) -> None:
    rig = start()
    rig.engine.stop()
    with pytest.raises(EngineStopped):
        rig.engine.submit(rig.request("r", FORMS[0].grammar))
