"""What is read off a chat template, and what it is given."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from router.chat_style import ChatStyle, ReasoningStyle, ToolCallParser
from router.errors import BadRequest, TemplateOccupied
from router.schemas import ChatBody
from router.tokenizer import TextTokenizer
from router.tool_schemas import tool_use
from tests.router.fake_workers import until
from tests.router.model_folder import write_model_folder

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
KNOWS = "{{ tools | tojson }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


def style(
    folder: Path,
    template: str,
    tools: ToolCallParser = "auto",
    reasoning: ReasoningStyle = "auto",
) -> ChatStyle:
    (folder / "chat_template.jinja").write_text(template)
    return ChatStyle(TextTokenizer.from_folder(folder), tools, reasoning)


def body(**fields: object) -> ChatBody:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatBody.parse({"model": "m", "messages": messages, "tools": TOOLS, **fields})


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("no tools", "hermes"),
        (f"{KNOWS} <tool_call>", "hermes"),
        (f"{KNOWS} [TOOL_CALLS]", "mistral"),
        (f"{KNOWS} <|python_tag|>", "llama3_json"),
        (f'{KNOWS} <|eot_id|> {{"name": …, "parameters": …}}', "llama3_json"),
    ],
)
def test_the_format_is_read_off_the_template(folder: Path, template: str, name: str) -> None:
    format = style(folder, template).format
    assert format is not None
    assert format.name == name
    forced = style(folder, template, "llama3_json").format
    assert forced is not None
    assert forced.name == "llama3_json"


def test_tools_of_an_unknown_format_are_refused(folder: Path) -> None:
    unknown = style(folder, f"{KNOWS} <|START_ACTION|>")
    with pytest.raises(BadRequest, match="--tool-call-parser") as refusal:
        unknown.check(tool_use(body()))
    assert refusal.value.param == "tools"
    assert unknown.check(None) is None


def test_a_template_that_knows_tools_gets_them(folder: Path) -> None:
    source = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        "{{ call.id }}={{ call.function.arguments.a }}{% endfor %}"
        "{{ message.tool_call_id }};{% endfor %} <tool_call>"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "6"},
    ]
    asked = body(messages=messages)
    told = style(folder, source).render(asked, tool_use(asked))
    assert told == "f system:Be brief.;assistant:call_1=5;tool:6call_1; <tool_call>"
    alone = body(tool_choice="none")
    assert style(folder, source).render(alone, tool_use(alone)) == "user:Hi; <tool_call>"


def test_ids_have_the_length_that_mistral_wants(folder: Path) -> None:
    source = "{{ messages[0].tool_calls[0].id }} {{ messages[1].tool_call_id }} {{ tools }}"
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": ""}
    asked = body(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}, result])
    first, second, _ = style(folder, source, "mistral").render(asked, None).split(" ")
    assert first == second
    assert len(first) == 9


@pytest.mark.parametrize("cut", ['{"a": ', '{"a": "\\ud800"}', "[" * 9000, "5"])
def test_arguments_that_are_no_object_come_back_as_they_were(folder: Path, cut: str) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools }}"
    function = {"name": "f", "arguments": cut}
    call = {"id": "c", "type": "function", "function": function}
    asked = body(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert style(folder, source).render(asked, None) == f"{json.dumps(function['arguments'])}None"


def test_a_final_message_is_found_whatever_it_says(folder: Path) -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}assistant"
    for said in ("e", "", "nd|>", "It is "):
        last = {"role": "assistant", "content": said}
        asked = body(messages=[*body().model_dump()["messages"], last], continue_final_message=True)
        told = style(folder, source, reasoning="deepseek_r1")
        assert told.render(asked, None) == f"<|user|>Hi<|end|><|assistant|>{said}"
        assert not told.prompt(asked, None).is_thinking
    with pytest.raises(BadRequest, match="continue_final_message"):
        style(folder, "none").render(asked, None)


@pytest.mark.parametrize(
    ("template", "reasoning", "thinks", "is_thinking"),
    [
        ("plain", "auto", False, False),
        ("<think></think>", "auto", True, False),
        ("<think></think>", "none", False, False),
        ("{# </think> #}assistant\n<think>\n", "auto", True, True),
        ("plain", "qwen3", True, False),
        ("plain", "deepseek_r1", True, True),
    ],
)
def test_whether_it_thinks(
    folder: Path, template: str, reasoning: ReasoningStyle, thinks: bool, is_thinking: bool
) -> None:
    model = style(folder, template, reasoning=reasoning)
    assert model.thinks == thinks
    assert model.prompt(body(), None).is_thinking == is_thinking


async def test_who_waits_behind_too_many_hears_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.chat_style._PATIENCE_S", 0.2)
    chats, may_end = style(folder, "no tools"), threading.Event()
    began: list[int] = []

    def hold(number: int) -> None:
        began.append(number)
        may_end.wait(20)

    busy = [asyncio.create_task(chats.on_thread(lambda: hold(1))) for _ in range(2)]
    await until(lambda: len(began) == 2)
    with pytest.raises(TemplateOccupied):
        await chats.on_thread(lambda: hold(2))
    may_end.set()
    await asyncio.gather(*busy, return_exceptions=True)
    assert await chats.on_thread(lambda: "rendered") == "rendered"
    chats.close()
    assert began == [1, 1], "nothing is done for who has left"
