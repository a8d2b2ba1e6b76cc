"""Renders a chat template, as a process of its own: `python -m router.template_sandbox`.

A template is a program that comes with a model. jinja2's sandbox keeps it from reaching anything;
what it may take of time and memory is bounded here, by the kernel: one rendering has so much
processor time, and so much on the wall, or the process is killed in the middle of it; and so much
memory. The parent (router/template_process.py) sees that and starts another.

1. The first line of stdin is the template's source, as JSON; it is compiled: `"ready"`.
2. Each other line is an object of variables; `{"text": …}` or `{"refused": why}` comes back.
3. At the end of stdin the process ends: with its parent, at the latest.

Imports little: it starts in a fraction of a second.
"""

import json
import sys
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.confinement import allow, confine, keep_answers_apart, say

MAX_CPU_S = 0.5
"""For compiling a template, and for each rendering."""
MAX_WALL_S = 0.9
"""For each rendering, from when it begins, however little it gets of the processors: whoever asked
for it hears so within a second."""
MAX_MEMORY_NBYTES = 1 << 30
"""Of the process's addresses."""
MAX_CHARS = 16 << 20
"""Of a prompt: no context is as long."""

_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


class GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """As transformers has it: the same sandbox, the same block trimming, the same functions."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def main() -> None:
    keep_answers_apart()
    confine(MAX_MEMORY_NBYTES)
    allow(MAX_CPU_S)
    try:
        template = environment().from_string(json.loads(sys.stdin.readline()))
    except _REFUSALS as error:
        say({"refused": str(error) or type(error).__name__})
        return
    say("ready")
    for line in sys.stdin:
        allow(MAX_CPU_S, MAX_WALL_S)
        try:
            text = template.render(json.loads(line))
        except _REFUSALS as error:
            say({"refused": str(error)[:1000] or type(error).__name__})
            continue
        if len(text) > MAX_CHARS:
            say({"refused": f"the prompt would have more than {MAX_CHARS} characters"})
            continue
        say({"text": text})


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


if __name__ == "__main__":
    main()
