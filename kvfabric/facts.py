"""Facts about KV, for people: why two fingerprints differ, in a sentence. Pure.

A fingerprint only says that two processes mean different things by KV. Beside it travels a short
text of facts, `name=value;name=value`, which whoever makes the fingerprint also makes. Nothing is
decided by it, and what it means is not known here.
"""


def difference(ours: str, theirs: str) -> str:
    """Of two texts of facts whose fingerprints differ; theirs may come from anybody."""
    mine, other = _read(ours), _read(theirs)
    told = [
        f"{name} is {value} here and {other[name]} there"
        for name, value in mine.items()
        if name in other and other[name] != value
    ]
    if told:
        return ", ".join(told)
    if not mine or not other:
        return "its fingerprint, of which nothing more is told"
    return "its fingerprint, though " + ", ".join(mine) + " are the same"


def _read(facts: str) -> dict[str, str]:
    printable = "".join(c if c.isprintable() else "?" for c in facts)
    pairs = (fact.partition("=") for fact in printable.split(";"))
    return {name: value for name, is_there, value in pairs if is_there}
