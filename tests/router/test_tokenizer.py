"""Model folders and chat templates, with what transformers does as the yardstick."""

import json
import threading
import time
from pathlib import Path

import pytest

from router.chat_messages import Message
from router.chat_template import ChatTemplate
from router.errors import BadRequest
from router.tokenizer import TextTokenizer, UnusableModelFolder
from tests.router.model_folder import byte_level_tokenizer, write_model_folder

MESSAGES = [Message(role="system", content="Be brief."), Message(role="user", content="Hi <b>!")]


def encode_chat(tokenizer: TextTokenizer, messages: list[Message]) -> tuple[int, ...]:
    return tokenizer.encode_bare(tokenizer.template.render(messages))


def test_a_chat_becomes_the_templates_text(tokenizer: TextTokenizer) -> None:
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>!<|im_end|>\n"
    expected = byte_level_tokenizer().encode(text + "<|im_start|>assistant\n").ids
    assert encode_chat(tokenizer, MESSAGES) == tuple(expected)


def test_what_a_template_refuses_is_the_users_error(tokenizer: TextTokenizer) -> None:
    with pytest.raises(BadRequest, match="no such role: pirate"):
        encode_chat(tokenizer, [Message(role="pirate", content="Arr")])


def test_a_long_text_leaves_the_other_threads_running(tokenizer: TextTokenizer) -> None:
    """The router's loop is one of them, with the tokens of everybody else."""
    is_encoding = threading.Event()

    def encode() -> None:
        is_encoding.set()
        tokenizer.encode("a " * 1_000_000)

    thread = threading.Thread(target=encode)
    thread.start()
    is_encoding.wait()
    pauses = []
    while thread.is_alive():
        begin = time.monotonic()
        time.sleep(0.001)
        pauses.append(time.monotonic() - begin)
    thread.join()
    assert max(pauses) < sum(pauses) / 3


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(BadRequest):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content | tojson }}", '<s>"Be brief."'),
        ("{{ messages[1].content | tojson }}", '"Hi <b>!"'),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_have_what_transformers_gives_them(source: str, expected: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == expected


def test_the_template_file_goes_before_the_config(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    ids = encode_chat(TextTokenizer.from_folder(tmp_path), MESSAGES)
    assert ids == tuple(byte_level_tokenizer().encode("<|im_end|>").ids)


def test_of_several_templates_the_default(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    ids = encode_chat(TextTokenizer.from_folder(tmp_path), MESSAGES)
    assert ids == tuple(byte_level_tokenizer().encode("d").ids)


def test_a_model_without_template_has_no_chat(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BadRequest, match="no chat template"):
        encode_chat(TextTokenizer.from_folder(tmp_path), MESSAGES)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UnusableModelFolder):
        TextTokenizer.from_folder(tmp_path)
    write_model_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnusableModelFolder):
        TextTokenizer.from_folder(tmp_path)
