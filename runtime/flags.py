"""Turns a frozen dataclass into command-line flags: one field, one flag.

A process has one config dataclass and parses it once, in its `__main__`:

    @dataclass(frozen=True)
    class RouterConfig:
        port: int = flag(8000, help="port to listen on")
        prefill: tuple[str, ...] = flag((), help="addresses of prefill workers")

    config = parse(RouterConfig, prog="python -m router", description="The router.")

`port` becomes `--port`, or else the environment variable BATON_PORT. A field without a default is
required. `bool` gives `--x` and `--no-x`, `tuple[str, ...]` is separated by commas, `Literal[...]`
gives choices. A flag that no field has is an error.
"""

import argparse
import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

Config = TypeVar("Config")

_BYTE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    parse: Callable[[str], object] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field with a help text, and a parser where its type does not say enough."""
    metadata = {"help": help, "parse": parse, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def nbytes(text: str) -> int:
    """Bytes out of "4096", "512MiB" or "1.5GiB": a parser for `flag`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _BYTE_UNITS:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; say for example 512MiB or 1GiB")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def up_to(most: int, number: Callable[[str], int] = int) -> Callable[[str], int]:
    """A parser for `flag`: a number from 0 to `most`, the bound that holds whatever is wanted."""

    def parse_number(text: str) -> int:
        value = number(text)
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not within 0 and {most}")
        return value

    return parse_number


def parse(
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Parses `argv` (default: the process's own) over the environment over the defaults.

    Exits with status 2 and a usage line when a flag is unknown, missing or malformed.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    hints = typing.get_type_hints(config_class)
    environ = os.environ if environ is None else environ
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        _add(parser, field, hints[field.name], environ.get(f"BATON_{field.name.upper()}"))
    return config_class(**vars(parser.parse_args(argv)))


def to_argv(config: object) -> list[str]:
    """What `parse` makes the same config of, whatever the environment says: for a process that
    shall run with this one's flags. A field that is None is left out."""
    argv: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            argv.append(f"--{name}={','.join(value)}")
        elif value is not None:
            argv.append(f"--{name}={value}")
    return argv


def _add(
    parser: argparse.ArgumentParser,
    field: dataclasses.Field[Any],
    hint: object,
    from_environment: str | None,
) -> None:
    hint = _without_none(hint)
    convert = field.metadata.get("parse") or _converter(hint)
    required = field.default is dataclasses.MISSING
    default = None if required else field.default
    if from_environment is not None:
        required, default = False, _convert(parser, field.name, hint, convert, from_environment)
    options: dict[str, Any] = {
        "dest": field.name,
        "help": _help(field, default),
        "required": required,
        "default": default,
    }
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": convert, "metavar": field.metadata.get("metavar") or _metavar(hint)}
    if typing.get_origin(hint) is Literal:
        options["choices"] = typing.get_args(hint)
    parser.add_argument("--" + field.name.replace("_", "-"), **options)


def _help(field: dataclasses.Field[Any], default: object) -> str:
    text = str(field.metadata.get("help", ""))
    if field.metadata.get("parse") is nbytes and isinstance(default, int):
        default = _size(default)
    if default not in (None, "", ()):
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _size(number: int) -> str:
    """As `nbytes` reads it, in the largest unit that it fills."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << shift:
            return f"{number / (1 << shift):g}{unit}"
    return str(number)


def _metavar(hint: object) -> str | None:
    if typing.get_origin(hint) is Literal:
        return None
    return {int: "N", float: "X"}.get(typing.cast(type, hint), "TEXT")


def _convert(
    parser: argparse.ArgumentParser,
    name: str,
    hint: object,
    convert: Callable[[str], object],
    text: str,
) -> object:
    """The environment's value; argparse itself checks only what stands on the command line."""
    try:
        value = convert(text)
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            raise ValueError(f"{text!r} is none of {', '.join(typing.get_args(hint))}")
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"environment variable BATON_{name.upper()}: {error}")
    return value


def _converter(hint: object) -> Callable[[str], object]:
    if hint is bool:
        return _bool
    if typing.get_origin(hint) is tuple:
        return _words
    if typing.get_origin(hint) is Literal:
        return str
    assert hint in (str, int, float), f"no flag for fields of type {hint}"
    return typing.cast(Callable[[str], object], hint)


def _without_none(hint: object) -> object:
    """`T` out of `T | None`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(f"not yes or no: {text!r}")
    return words[text.lower()]
