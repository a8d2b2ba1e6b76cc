"""What a grammar may ask for before anybody tries to compile it.

Compiling has limits of its own (runtime/grammar.py), but some grammars cost seconds before they
reach one: those are known by their looks. Each bound is far beyond what people write, and low
enough that what passes compiles in a fraction of a second. Pure; raises GrammarError.

What llguidance adds to Lark has its own: schemas within a grammar are held to the bounds of
schemas, and what no counter stops is refused (`&` and `~` of terminals, parameters of rules).
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from runtime.grammar import GrammarError

MAX_SCHEMA_CHARS = 128 << 10
MAX_SCHEMA_DEPTH = 100
MAX_PROPERTIES = 1_000
"""Of one object; twice as many in the whole schema."""
MAX_MULTIPLE = 10_000
MAX_REGEX_CHARS = 16 << 10
MAX_REPETITION = 10_000
MAX_CHOICES = 4_096
MAX_CHOICES_CHARS = 128 << 10
MAX_EBNF_CHARS = 32 << 10
MAX_RULES = 256

_RULE = re.compile(r"^[ \t]*[?!]?[\w.-]+[^\n:]{0,64}:", re.MULTILINE)
_LARK_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*'  # a string, a regex, a comment
    r"|(?P<schema>%json)|(?P<unbounded>&|~(?!\s*\d)|::)"
)
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}|~ ?(\d+)(?: ?\.\. ?(\d+))?")


def check_schema(schema: object) -> None:
    """`schema` is parsed JSON, or what pydantic made of it."""
    num_chars = num_properties = 0
    multiples: list[int] = []
    for key, value, depth in _walk(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")
        num_chars += len(key) + (len(value) if isinstance(value, str) else 4)
        if isinstance(value, dict) and key == "properties":
            num_properties += len(value)
            if len(value) > MAX_PROPERTIES or num_properties > 2 * MAX_PROPERTIES:
                raise GrammarError(
                    f"it has more than {MAX_PROPERTIES} properties in an object, "
                    f"or {2 * MAX_PROPERTIES} in all"
                )
        elif key == "multipleOf" and isinstance(value, int | float):
            multiples.append(_odd_part(value))
        elif key == "pattern" and isinstance(value, str):
            check_regex(value)
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                check_regex(pattern)
    if num_chars > MAX_SCHEMA_CHARS:
        raise GrammarError(f"it is longer than {MAX_SCHEMA_CHARS} characters")
    # An automaton over remainders for each; a common one where several hold for a number.
    if math.lcm(*set(multiples)) > MAX_MULTIPLE or sum(multiples) > 2 * MAX_MULTIPLE:
        raise GrammarError(f"multipleOf is too large: {MAX_MULTIPLE} is the most, in common too")


def depth_of(schema: object) -> int:
    """How deep it is nested; `MAX_SCHEMA_DEPTH + 1` if more than allowed."""
    depth = 0
    for _, _, at in _walk(schema):
        depth = max(depth, at)
        if depth > MAX_SCHEMA_DEPTH:
            break
    return depth


def check_regex(pattern: str) -> None:
    if len(pattern) > MAX_REGEX_CHARS:
        raise GrammarError(f"a pattern is longer than {MAX_REGEX_CHARS} characters")
    if _repetition(pattern) > MAX_REPETITION:
        raise GrammarError(
            f"a pattern repeats something more than {MAX_REPETITION} times, "
            "counted repetitions within each other multiplied"
        )


def check_choices(choices: Sequence[str]) -> None:
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHOICES_CHARS:
        raise GrammarError(
            f"there are more than {MAX_CHOICES} choices, or {MAX_CHOICES_CHARS} characters in them"
        )


def check_ebnf(text: str) -> None:
    if len(text) > MAX_EBNF_CHARS:
        raise GrammarError(f"it is longer than {MAX_EBNF_CHARS} characters")
    if len(_RULE.findall(text)) > MAX_RULES:
        raise GrammarError(f"it has more than {MAX_RULES} rules")
    if any(_times(count) > MAX_REPETITION for count in _COUNT.finditer(text)):
        raise GrammarError(f"it repeats something more than {MAX_REPETITION} times")


def check_lark(text: str) -> None:
    """Of what was EBNF, or is Lark."""
    if text.lstrip().startswith("{"):
        raise GrammarError("it is JSON: send it as a JSON schema")
    schemas: list[object] = []
    index = 0
    while part := _LARK_PART.search(text, index):
        index = part.end()
        if part["unbounded"]:
            raise GrammarError(
                f"{part['unbounded']!r}: complements and intersections of terminals, and "
                "parameters of rules, are not served"
            )
        if part["schema"]:
            schema, index = _json_at(text, index)
            schemas.append(schema)
    check_schema(schemas)


def _json_at(text: str, index: int) -> tuple[object, int]:
    """And where it ends."""
    start = index + len(text[index:]) - len(text[index:].lstrip())
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"no schema follows %json: {error}") from error
    return schema, end


def _walk(root: object) -> Iterator[tuple[str, object, int]]:
    """(key, value, depth) of everything in it; keys of lists' items are empty."""
    stack: list[tuple[str, object, int]] = [("", root, 1)]
    while stack:
        key, value, depth = stack.pop()
        yield key, value, depth
        if isinstance(value, dict):
            stack += ((str(name), part, depth + 1) for name, part in value.items())
        elif isinstance(value, list):
            stack += (("", part, depth + 1) for part in value)


def _odd_part(value: float) -> int:
    """What is left of its digits without factors 2 and 5: those need no memory for remainders."""
    if not math.isfinite(value):
        return 1  # the compiler refuses it
    digits = int("".join(map(str, Decimal(str(+value)).as_tuple().digits)))
    for factor in (2, 5):
        while digits and digits % factor == 0:
            digits //= factor
    return max(1, digits)


def _repetition(pattern: str) -> int:
    """The largest product of counted repetitions that stand within each other."""
    largest = [1]  # of each group that is open, from the outermost on
    atom = 1  # of what a count would repeat
    index = 0
    while index < len(pattern):
        char, index = pattern[index], index + 1
        if char == "{" and (count := _COUNT.match(pattern, index - 1)):
            atom, index = atom * _times(count), count.end()
            largest[-1] = max(largest[-1], atom)
            continue
        if char == "(":
            largest.append(1)
        elif char == ")" and len(largest) > 1:
            atom = largest.pop()
            largest[-1] = max(largest[-1], atom)
            continue
        elif char == "\\":
            index += 1
        elif char == "[":
            index = _class_end(pattern, index)
        elif char in "*+?":
            continue
        atom = 1
    return max(largest)


def _class_end(pattern: str, index: int) -> int:
    """Behind the `]` of a class whose `[` stands before `index`; a `]` at its start is a member."""
    if pattern.startswith("^", index):
        index += 1
    index += pattern.startswith("]", index)
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1


def _times(count: re.Match[str]) -> int:
    numbers = [min(int(number[:9]), 10**9) for number in count.groups() if number]
    return max(numbers, default=1)
