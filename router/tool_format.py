"""How a model calls tools: what its template tells, how its calls are read, how they are held to
their form.

Chosen by the chat template, or by `--tool-call-parser`. Each format has a parser (router/parsers)
and the pieces of a grammar (router/tool_grammar.py).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from router.parsers import hermes, llama, mistral
from router.parsers.chars import ToolParser
from runtime.grammar import quoted

Mark = Callable[[str], str]
"""A mark of the format as a grammar writes it: one token, where the model has one for it."""


class ToolFormat(ABC):
    name: str
    marks: Collection[str] = ()
    """What a model may have special tokens for that are part of its text here."""
    trigger: str
    """The text with which a call begins. One of `marks`, or nothing that has a token."""
    never: str
    """What text between calls does not hold, as a regex: the parser might take it for one."""
    separator: str = ""
    """Between two calls."""
    is_list: bool = False
    """Calls share a trigger: there is one in an answer that is held to calls."""
    id_chars: int = 24
    """Of the ids that calls get."""

    @abstractmethod
    def parser(self, names: Collection[str]) -> ToolParser:
        """`names` of the request's tools."""

    @abstractmethod
    def call(self, name: str, arguments: str, mark: Mark) -> str:
        """One call as a grammar's expression, behind the trigger. `arguments`: a rule's name."""

    def block(self, call: str, *, is_one: bool) -> str:
        """What may follow a trigger: one call, or several where those share it."""
        return call


class HermesFormat(ToolFormat):
    name = "hermes"
    marks = (hermes.OPEN, hermes.CLOSE)
    trigger = hermes.OPEN
    never = hermes.OPEN
    separator = "\n"

    def parser(self, names: Collection[str]) -> ToolParser:
        return hermes.HermesParser()

    def call(self, name: str, arguments: str, mark: Mark) -> str:
        head = quoted(f'\n{{"name": "{name}", "arguments": ')
        return f"{head} {arguments} {quoted('}' + chr(10))} {mark(hermes.CLOSE)}"


class LlamaFormat(ToolFormat):
    name = "llama3_json"
    marks = (llama.TAG,)
    trigger = '{"name": "'
    never = r'\{\s*"(name|type)"'
    separator = "; "

    def parser(self, names: Collection[str]) -> ToolParser:
        return llama.LlamaParser(names)

    def call(self, name: str, arguments: str, mark: Mark) -> str:
        head = quoted(f'{name}", "parameters": ')
        return f"{head} {arguments} {quoted('}')}"


class MistralFormat(ToolFormat):
    """The older form: one list for all calls."""

    name = "mistral"
    marks = (mistral.TAG, mistral.ARGS, mistral.ID)
    trigger = mistral.TAG
    never = re.escape(mistral.TAG)
    is_list = True
    id_chars = 9  # its templates refuse others

    def parser(self, names: Collection[str]) -> ToolParser:
        return mistral.MistralParser()

    def call(self, name: str, arguments: str, mark: Mark) -> str:
        head = quoted(f'{{"name": "{name}", "arguments": ')
        return f"{head} {arguments} {quoted('}')}"

    def block(self, call: str, *, is_one: bool) -> str:
        more = "" if is_one else f" ({quoted(', ')} {call})*"
        return f"{quoted('[')} {call}{more} {quoted(']')}"


class NamedMistralFormat(MistralFormat):
    """The newer one, of models that have a token for `[ARGS]`."""

    is_list = False

    def call(self, name: str, arguments: str, mark: Mark) -> str:
        return f"{quoted(name)} {mark(mistral.ARGS)} {arguments}"

    def block(self, call: str, *, is_one: bool) -> str:
        return call
