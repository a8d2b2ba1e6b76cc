"""`python -m router.new_key TENANT` (`baton keys`): makes an API key, and its line for the file.

The key goes to stdout, alone, so that it can be piped to where it belongs; it is stored nowhere.
The line goes to stderr, or with `--file FILE` to the end of that file.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from router.keys import WORDS, BadKeys, line_of, new_key, parse

_HELP = {
    "requests_per_min": "requests a minute",
    "tokens_per_min": "prompt and output tokens a minute",
    "concurrent": "requests at once",
    "priority": "of the tenant, -10 to 10; lower goes first",
    "weight": "share of the tenant among those of its priority",
    "slo_ttft_ms": "objective for the time to the first token",
    "slo_tpot_ms": "objective for the time per output token after the first",
    "operator": "1: it may see what all tenants do",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="baton keys", description=__doc__, allow_abbrev=False)
    parser.add_argument("tenant", help="whose key it is")
    parser.add_argument("--file", help="key file to add the line to; made if it is not there")
    for name in WORDS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", help=_HELP[name])
    options = parser.parse_args(argv)
    told = {name: getattr(options, name) for name in WORDS}
    key = new_key()
    words = [f"{name}={value}" for name, value in told.items() if value is not None]
    try:
        line = line_of(key, options.tenant, words)
        if options.file is not None:
            _append(Path(options.file), line)
    except (BadKeys, OSError, ValueError) as error:
        parser.error(str(error))
    if options.file is None:
        sys.stderr.write(line + "\n")
    sys.stdout.write(key + "\n")


def _append(path: Path, line: str) -> None:
    """Raises BadKeys if the file would not be understood with it."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = before + ("" if before.endswith("\n") or not before else "\n") + line + "\n"
    parse((str(path), text))
    if not before:
        path.touch(mode=0o600)
    with path.open("a", encoding="utf-8") as file:
        file.write(text[len(before) :])


if __name__ == "__main__":
    main()
