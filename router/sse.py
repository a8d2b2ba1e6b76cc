"""Server-sent events, of one line of JSON each."""

_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""They stand raw in JSON and end no line of an event, but many clients think so."""


def event(json: str) -> bytes:
    return f"data: {one_line(json)}\n\n".encode()


def one_line(json: str) -> str:
    """The same JSON, in one line to every client; it has none of the usual line ends."""
    return json if json.isascii() else json.translate(_LINE_ENDS)
