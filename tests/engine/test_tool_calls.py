"""A random model under the grammars of a router: it calls a tool where it must, in every format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.request import FinishReason
from router.tool_format import HermesFormat, LlamaFormat, MistralFormat, ToolFormat
from router.tool_grammar import chat_grammar
from router.tool_schemas import ToolFields, tool_use
from tests.engine.grammar_rig import Start, starting
from tests.router.parsers.pieces import calls_of, parsed, text_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"enum": ["Rome", "東京"]}, "days": {"enum": [1, 2]}},
    "required": ["to", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go", "strict": True, "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "go"}}


@pytest.fixture
def start(text_model: Path) -> Iterator[Start]:
    with starting(text_model) as start:
        yield start


@pytest.mark.parametrize(
    "format", [HermesFormat(), LlamaFormat(), MistralFormat()], ids=lambda format: format.name
)
def test_it_calls_where_it_must(start: Start, format: ToolFormat) -> None:
    use = tool_use(ToolFields.model_validate({"tools": [TOOL], "tool_choice": NAMED}))
    wanted = chat_grammar(None, use, format, lambda text: None, thinks=False, is_thinking=False)
    assert wanted is not None
    rig, grammar = start(), wanted.write()
    requests = [
        rig.request(
            f"{temperature}/{seed}", grammar, temperature=temperature, seed=seed, max_tokens=700
        )
        for temperature in (0.0, 1.0)
        for seed in range(4)
    ]
    for request, token_ids in zip(requests, rig.run(*requests), strict=True):
        events = parsed(format.parser(["go"]), [rig.text(token_ids)])
        ((name, arguments),) = calls_of(events)
        assert (name, text_of(events)) == ("go", "")
        jsonschema.validate(json.loads(arguments), SCHEMA)
        assert rig.finish_reason(request) is FinishReason.STOP
