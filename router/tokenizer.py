"""Text to token ids, from the files of a model folder. Knows no model and no tensors.

Reads `tokenizer.json`, and what is there of `tokenizer_config.json` (special tokens, template),
`chat_template.jinja` (goes before the config's template) and `config.json` (vocabulary size: a
model may have more rows than its tokenizer has tokens). `vocabulary` is the same tokens as grammars
need them; None if the tokenizer is of a kind that they cannot use.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from router.byte_detokenizer import ByteDetokenizer, table_of
from router.chat_template import ChatTemplate
from router.detokenizer import Detokenizer, WindowDetokenizer
from router.errors import BadRequest, RouterError
from router.request import Echo
from router.token_bytes import TokenBytes
from runtime.grammar import UnusableTokenizer, Vocabulary
from runtime.log import get_logger

log = get_logger()

JSONObject = dict[str, object]


class UnusableModelFolder(RouterError):
    """The folder lacks a tokenizer, or a file in it cannot be read."""


class TextTokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        chat_template: ChatTemplate | None,
        vocabulary: Vocabulary | None = None,
        end_token_ids: Collection[int] = (),
    ) -> None:
        self._end_token_ids = frozenset(end_token_ids)
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._token_table = table_of(tokenizer, self._special_ids)
        self.vocab_size = vocab_size
        self.token_bytes = TokenBytes(tokenizer)
        self.vocabulary = vocabulary

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Raises UnusableModelFolder."""
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise UnusableModelFolder(f"{path}: no tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(path / "tokenizer_config.json")
        size = _read_json(path / "config.json").get("vocab_size")
        vocab_size = size if isinstance(size, int) else tokenizer.get_vocab_size()
        source = _template_source(path, config)
        template = ChatTemplate(source, _special_tokens(config)) if source else None
        ends = _end_token_ids(path)
        vocabulary = _vocabulary(path, vocab_size, ends)
        named = tokenizer.token_to_id(_special_tokens(config).get("eos_token", ""))
        ends = ends if named is None else [*ends, named]
        return cls(tokenizer, vocab_size, template, vocabulary, ends)

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt as it stands, with the special tokens that the model wants around it."""
        return self._encode(text, add_special_tokens=True)

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """A piece of text, without special tokens around it; those written out in it count."""
        return self._encode(text, add_special_tokens=False)

    @property
    def template(self) -> ChatTemplate:
        """Raises BadRequest if the model has none."""
        if self.chat_template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.")
        return self.chat_template

    def token_of(self, text: str) -> int | None:
        """The id of the token of its own that the text has, if it has."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def token_name(self, token_id: int) -> str:
        """As the tokenizer's files name it; empty if it has none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    @property
    def inner_special_ids(self) -> frozenset[int]:
        """Special tokens but those that end outputs."""
        return self._special_ids - self._end_token_ids

    def detokenizer(self, shown: Collection[int] = ()) -> Detokenizer:
        """`shown`: special tokens that are part of the text all the same."""
        if self._token_table is not None:
            return ByteDetokenizer(self._token_table, shown)
        return WindowDetokenizer(self._tokenizer, self._special_ids, shown)

    def echo(self, token_ids: Sequence[int]) -> Echo:
        """A prompt as text; special tokens have none."""
        detokenizer, text, offsets = self.detokenizer(), "", []
        for token_id in token_ids:
            offsets.append(len(text))
            text += detokenizer.push(token_id)
        return Echo(text + detokenizer.flush(), tuple(offsets))

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # A batch of one: `encode` holds the GIL, for seconds if the text has megabytes.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)


def _read_json(path: Path) -> JSONObject:
    """{} if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UnusableModelFolder(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise UnusableModelFolder(f"{path}: not a JSON object")
    return content


def _end_token_ids(path: Path) -> list[int]:
    ends = _read_json(path / "generation_config.json").get("eos_token_id")
    ends = _read_json(path / "config.json").get("eos_token_id") if ends is None else ends
    listed = ends if isinstance(ends, list) else [ends]
    return [token_id for token_id in listed if isinstance(token_id, int)]


def _vocabulary(path: Path, vocab_size: int, end_token_ids: Sequence[int]) -> Vocabulary | None:
    try:
        return Vocabulary.from_folder(path, vocab_size, end_token_ids)
    except UnusableTokenizer as error:
        log.warning("no structured outputs", reason=str(error))
        return None


def _template_source(path: Path, config: Mapping[str, object]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, …: templates name them; each is a string or an object around one."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
