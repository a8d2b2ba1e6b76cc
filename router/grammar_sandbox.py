"""Compiles grammars to see whether they can be obeyed: `python -m router.grammar_sandbox`.

What stops most bombs is cheaper (router/grammar_bounds.py, and the library's own counters). The
kernel stops those that no bound knows: one grammar has so much processor time, so much on the wall
and so much memory, or the process is killed. So is it by what the library may do to itself. The
parent (router/grammar_process.py) sees that and starts another.

1. The first line of stdin is a `VocabularySource`; it is read, in the parent's time: `"ready"`.
2. Each other line is a grammar's text; `{}` comes back, or `{"refused": why}`.
3. At the end of stdin the process ends: with its parent, at the latest.
"""

import json
import sys
from pathlib import Path

import numpy as np

from router.confinement import allow, confine, keep_answers_apart, say, used_nbytes
from runtime.grammar import GrammarError, UnusableTokenizer, Vocabulary, VocabularySource

MAX_CPU_S = 0.8
"""For one grammar."""
MAX_WALL_S = 0.9
"""For one grammar, from when it begins, however little it gets of the processors."""
MAX_MEMORY_NBYTES = 512 << 20
"""For grammars, beside interpreter and vocabulary. What the limits let through took 60 MiB."""
_NUM_PROBED = 4


def probe(vocabulary: Vocabulary, text: str) -> None:
    """Compiles it and walks its first steps: where nothing may come, or the limits stop it at once.
    Raises GrammarError."""
    grammar = vocabulary.compile(text)
    words = np.empty(vocabulary.row_size, dtype=np.int32)
    for _ in range(_NUM_PROBED):
        grammar.fill(words)
        if not words.any():
            raise GrammarError("no output can fit it")
        may_come = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        goes_on = [int(id) for id in may_come if int(id) not in vocabulary.end_token_ids]
        if not goes_on:
            return
        grammar.advance([goes_on[len(goes_on) // 2]])


def main() -> None:
    keep_answers_apart()
    source = VocabularySource(*json.loads(sys.stdin.readline()))
    try:
        vocabulary = Vocabulary.from_folder(Path(source.folder), source.size, source.end_token_ids)
    except UnusableTokenizer as error:
        say({"refused": str(error)})
        return
    confine(used_nbytes() + MAX_MEMORY_NBYTES)
    say("ready")
    for line in sys.stdin:
        allow(MAX_CPU_S, MAX_WALL_S)
        try:
            probe(vocabulary, json.loads(line))
        except GrammarError as error:
            say({"refused": str(error)})
        except MemoryError:
            say({"refused": "it takes too much memory to compile"})
        else:
            say({})


if __name__ == "__main__":
    main()
