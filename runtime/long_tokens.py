"""Takes tokens that are too long for grammars out of a tokenizer's file, ids as they are.

A trie of llguidance's counts how deep it is in ten bits, and panics at a longer token. Such a token
gets a name here that no text has, and counts as special from then on: no text leads to it, neither
in a mask nor when a text that must follow is split into tokens, and all others are as they were.
Pure; knows the format of `tokenizer.json`, but not the library.
"""

import json
from typing import Any, NamedTuple

MAX_NBYTES = 1024
"""Of a token's bytes; the mark in front of a special token's name is one of them."""
_MAX_CHAR_NBYTES = 4
_NAME = "\uffff{}"  # a code point that is no character, and the id
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's


class Shortened(NamedTuple):
    tokenizer: str
    """JSON."""
    left_out: frozenset[int]
    """Ids of the tokens that are special now, and mean nothing."""


def shortened(tokenizer: str) -> Shortened | None:
    """`tokenizer` is a file's JSON. None: no token of it is too long. Raises ValueError, TypeError,
    LookupError or AttributeError for what is no tokenizer's."""
    # Most files give each token a line, and looking at lines is far quicker than reading JSON.
    if all(len(line) <= MAX_NBYTES // _MAX_CHAR_NBYTES for line in tokenizer.split("\n")):
        return None
    content = json.loads(tokenizer)
    vocab, added = content["model"]["vocab"], content["added_tokens"]
    ids = vocab if isinstance(vocab, dict) else {row[0]: id for id, row in enumerate(vocab)}
    is_byte_level = _is_byte_level(content.get("decoder") or {})
    entries = {entry["content"]: entry for entry in added}
    left_out = {
        name: entry["id"]
        for name, entry in entries.items()
        if _nbytes(name, is_byte_level) + bool(entry["special"]) > MAX_NBYTES
    }
    for name, token_id in ids.items():
        # Of a byte-level name each character is a byte, however many it takes itself.
        nbytes = len(name) if is_byte_level else _nbytes(name, is_byte_level)
        if name not in entries and nbytes > MAX_NBYTES:
            left_out[name] = token_id
    if not left_out:
        return None
    names = {name: _NAME.format(token_id) for name, token_id in left_out.items()}
    _rename(content["model"], names)
    content["added_tokens"] = _added(added, left_out, names)
    return Shortened(json.dumps(content), frozenset(left_out.values()))


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    parts = [decoder, *decoder.get("decoders", ())]
    return any(part["type"] == "ByteLevel" for part in parts if part)


def _nbytes(name: str, is_byte_level: bool) -> int:
    return len((name if is_byte_level else name.replace(_SPACE, " ")).encode())


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    vocab = model["vocab"]
    if not isinstance(vocab, dict):
        model["vocab"] = [[names.get(row[0], row[0]), *row[1:]] for row in vocab]
        return
    model["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _concerns(merge, names)]


def _concerns(merge: str | list[str], names: dict[str, str]) -> bool:
    """`merge` is two names that become one: a list, or with a space between them."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _added(
    added: list[dict[str, Any]], left_out: dict[str, int], names: dict[str, str]
) -> list[dict[str, Any]]:
    """In the order of their ids, in which those that are not in the vocabulary are given theirs."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    kept = [entry for entry in added if entry["content"] not in names]
    special = [
        {"id": left_out[name], "content": names[name], **plain, "special": True} for name in names
    ]
    return sorted(kept + special, key=lambda entry: int(entry["id"]))
