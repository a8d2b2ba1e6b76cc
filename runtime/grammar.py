"""What outputs must look like: a grammar over the bytes of tokens, and where a sample stands in it.

The only module that imports llguidance. The router and the engines must agree on what a grammar is:
the router compiles it to refuse it, a worker to obey it, under the same limits.

1. `of_json_schema`, `of_regex`, `of_choices`, `of_ebnf` write a grammar as text. The text travels.
2. `Vocabulary.compile` makes a `Grammar` of it, at its start.
3. `advance` takes output tokens, `fill` tells which may follow. A `Grammar` is a function of its
   text and the tokens it took: whoever has both can rebuild it.

Compiling and filling release the GIL; neither takes long, whatever the grammar: the limits below
stop both. Nothing here knows requests, logits or threads; one `Grammar` belongs to one thread at a
time.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from runtime.long_tokens import shortened

MAX_GRAMMAR_NBYTES = 256 << 10
"""Of a grammar's text."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between JSON's parts. Bounded: a model that is unsure goes on with spaces until it is cut off."""

# The library's own counters, far below its defaults, under which one mask of `(a{1000}){1000}` took
# 0.7 s and 190 MB. Under these the longest took 20 ms, and grammars that people write need less
# than a tenth.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=20_000,
    max_items_in_row=4_100,  # four for each optional property of an object
    max_lexer_states=50_000,
    verbose_errors=False,
)
# Where one byte alone may come next the library goes ahead by itself, to tell which token it will
# be, and from `root ::= x root`, `x ::= "a"*` never comes back. The last of such lines holds.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
_BITS = 32
_SILENT = 0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class GrammarError(ValueError):
    """The grammar cannot be compiled, or what it is given does not fit it; the text says why."""


class UnusableTokenizer(ValueError):
    """The tokenizer file says nothing, or nothing usable, about the bytes of its tokens."""


def _no_panic(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A panic of the library's is no Exception, and would end the thread that it comes to: here it
    is a GrammarError."""

    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # nobody exports the class
                raise
            raise GrammarError(f"the library failed: {error}") from error

    return guarded


def of_json_schema(schema: object, options: Mapping[str, object]) -> str:
    """JSON that `schema` (an object, true or false) accepts. `options` are llguidance's: lenient,
    whitespace_flexible, whitespace_pattern. Raises GrammarError."""
    # The library takes these options only within an object; true and {} say the same.
    parsed = {} if schema is True else schema
    if not isinstance(parsed, dict):
        raise GrammarError("the schema is neither an object nor true")
    wanted = {"lenient": False, "whitespace_pattern": WHITESPACE, **options}
    try:
        return LLMatcher.grammar_from_json_schema(
            parsed,
            overrides=wanted,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise GrammarError(str(error)) from error


def of_regex(pattern: str) -> str:
    """All of the output matches `pattern`. It knows no look-around and no back references."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Sequence[str]) -> str:
    """Exactly one of `choices`."""
    # One terminal, not a rule of alternatives: the parser's rows then stay short.
    texts = " | ".join(quoted(choice) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")


def quoted(text: str) -> str:
    """As Lark reads it: like JSON, but DEL must be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def of_ebnf(text: str) -> str:
    """GBNF (`root ::= …`) or Lark (`start: …`). Raises GrammarError."""
    try:
        lark = any_to_lark(text) if "::=" in text else text
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:  # the converter's own errors have no common type
        raise GrammarError(str(error)) from error
    return LLMatcher.grammar_from_lark(lark + _UNFORCED)


def composed(rules: str, parts: Mapping[str, str]) -> str:
    """`rules` in Lark, in which `@name` stands for the grammar of that name in `parts`."""
    grammars: list[dict[str, object]] = [{"lark_grammar": rules}]
    for name, text in parts.items():
        grammar = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        assert len(grammar) == 1, "what this module writes has one"
        grammars.append({**grammar[0], "name": name})
    return json.dumps({"grammars": grammars})


class VocabularySource(NamedTuple):
    """What `Vocabulary.from_folder` was given: for another process's."""

    folder: str
    size: int
    end_token_ids: Sequence[int]


class Vocabulary:
    """The bytes of each token, and the tokens that end an output. Built once in a process."""

    def __init__(
        self, tokens: LLTokenizer, source: VocabularySource, left_out: frozenset[int]
    ) -> None:
        """`left_out`: tokens that `tokens` has under names that are not theirs."""
        self._tokens = tokens
        self.source = source
        self.size: int = tokens.vocab_size
        self.end_token_ids = frozenset(tokens.eos_tokens)
        self._left_out = left_out - self.end_token_ids
        self._others = _all_but(self._left_out, self.row_size)

    @classmethod
    def from_folder(cls, path: Path, size: int, end_token_ids: Iterable[int] = ()) -> Self:
        """Of a model folder's tokenizer.json, for a model of `size` tokens; `end_token_ids` default
        to what the file says. Tokens that are too long for a grammar (runtime/long_tokens.py) may
        never come, unless they end an output. 0.2 s for 49,152 tokens, and it keeps the GIL: for a
        process's start. Raises UnusableTokenizer."""
        ends = sorted(end_token_ids) or None
        file = path / "tokenizer.json"
        try:
            short = shortened(file.read_text(encoding="utf-8"))
            source = str(file) if short is None else short.tokenizer
            tokens = _no_panic(LLTokenizer)(source, n_vocab=size, eos_token=ends)
        except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            raise UnusableTokenizer(f"{path}: {error}") from error
        left_out = frozenset[int]() if short is None else short.left_out
        return cls(tokens, VocabularySource(str(path), size, ends or ()), left_out)

    @property
    def row_size(self) -> int:
        """Words of a row of `Grammar.fill`."""
        return -(-self.size // _BITS)

    def is_special(self, token_id: int) -> bool:
        """It stands for no text."""
        return token_id not in self._left_out and self._tokens.is_special_token(token_id)

    def keep(self, row: npt.NDArray[np.int32]) -> None:
        """Of a row of `Grammar.fill`, all but the tokens that are too long for grammars."""
        if self._left_out:
            row &= self._others

    @_no_panic
    def compile(self, grammar: str) -> "Grammar":
        """Raises GrammarError."""
        if len(grammar) > MAX_GRAMMAR_NBYTES:
            raise GrammarError(f"it is longer than {MAX_GRAMMAR_NBYTES} bytes")
        matcher = LLMatcher(self._tokens, grammar, limits=_LIMITS, log_level=_SILENT)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return Grammar(self, matcher)


class Grammar:
    """Where one sample stands. See the module."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher

    @property
    def may_end(self) -> bool:
        """The tokens so far are a whole output."""
        return self._matcher.is_accepting()

    @_no_panic
    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarError for tokens that do not fit; it is of no use afterwards."""
        # Not token by token: the library prints a warning for each that it refuses.
        taken = self._matcher.try_consume_tokens(list(token_ids))
        if taken < len(token_ids):
            refusal = f"token {token_ids[taken]} does not fit it"
            raise GrammarError(_reason(self._matcher) or refusal)

    @_no_panic
    def would_end(self, token_id: int) -> bool:
        """With this token, which may follow, the output would be whole."""
        if not self._matcher.try_consume_tokens([token_id]):
            return False
        whole = self._matcher.is_accepting()
        self._matcher.rollback(1)
        return whole

    @_no_panic
    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Sets bit `i % 32` of word `i // 32` where token i may follow, and clears the others;
        end tokens may follow exactly where `may_end`. row: [row_size], contiguous. Raises
        GrammarError if the limits stop it."""
        assert row.shape == (self.vocabulary.row_size,), row.shape
        assert row.flags["C_CONTIGUOUS"]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))
        self.vocabulary.keep(row)


def _all_but(token_ids: Iterable[int], row_size: int) -> npt.NDArray[np.int32]:
    row = np.full(row_size, -1, dtype=np.int32)
    for token_id in token_ids:
        row.view(np.uint32)[token_id // _BITS] ^= np.uint32(1 << token_id % _BITS)
    return row


def _reason(matcher: LLMatcher) -> str:
    """The library's error, if there is one."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    text = text.partition("<backtrace>")[0].strip()  # of a panic that it has caught itself
    if text.startswith("NoExtension"):
        return "no output can fit it"
    if text.startswith("panic:"):
        return f"the library failed: {text.removeprefix('panic:').strip()}"
    return text if len(text) <= 400 else f"{text[:400]} …"
