"""`baton completion bash|zsh|fish`: a script that completes commands and flags in that shell.

    source <(baton completion bash)        # in ~/.bashrc; zsh alike in ~/.zshrc
    baton completion fish > ~/.config/fish/completions/baton.fish

The script asks `baton completion --words WORD...` what may come next, so it never goes stale.
"""

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence

_BASH = """\
_baton() {
  local IFS=$'\\n'
  local found="$(baton completion --words "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)"
  COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _baton baton
"""
_ZSH = """\
#compdef baton
_baton() {
  local -a found
  found=(${(f)"$(baton completion --words "${(@)words[2,CURRENT-1]}" 2>/dev/null)"})
  compadd -a found || _files
}
compdef _baton baton
"""
_FISH = """\
complete -c baton -f -a '(baton completion --words (commandline -opc)[2..] 2>/dev/null)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(argv: Sequence[str], commands: Sequence[str], help_of: Callable[[str], str]) -> int:
    """`help_of` tells the help of a command."""
    if list(argv[:1]) == ["--words"]:
        print("\n".join(next_words(argv[1:], commands, help_of)))
        return 0
    parser = ArgumentParser(
        prog="baton completion",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SCRIPTS)
    print(SCRIPTS[parser.parse_args(argv).shell], end="")
    return 0


def next_words(
    words: Sequence[str], commands: Sequence[str], help_of: Callable[[str], str]
) -> list[str]:
    """What may follow `words`, those after `baton`; flags that stand there are left out."""
    if not words:
        return sorted(commands)
    if words[0] == "completion":
        return sorted(SCRIPTS) if len(words) == 1 else []
    if words[0] not in commands:
        return []
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_of(words[0])))
    return sorted(flags - {word.split("=", 1)[0] for word in words})
