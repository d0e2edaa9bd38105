"""Command-line flags derived from the fields of frozen dataclasses.

A field's name with dashes is its flag, the text given to `flag` its documentation and its help. Never knows which flags
there are: the dataclasses next to it and the benchmarks' settings declare them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field
from numbers import Integral
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from jaxsgl.errors import ConfigError

ConfigT = TypeVar("ConfigT")
LEAST_LIKENESS = 0.8  # of names of which one is taken for the other, misspelled; difflib's 0.6 finds other words


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    alias: str | tuple[str, ...] = (),
    secret: bool = False,
    words: bool = False,
    same: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
      default: the field's and the flag's.
      help: the flag's help text, which is the field's documentation.
      choices: values that are allowed; (): all of the field's type.
      same: other words for some of them, as other servers have them.
      alias: other names of the flag, as other servers have it.
      words: a list of texts that is given as several words, as they may hold commas.
      secret: left out of `repr` and of `public_flags`, hence of logs, of what servers report, and of help's defaults.
    """
    aliases = (alias,) if isinstance(alias, str) else alias
    metadata = {"help": help, "choices": choices, "aliases": aliases, "secret": secret, "words": words, "same": same}
    return field(default=default, repr=not secret, metadata=metadata)


def add_flags(
    parser: argparse._ActionsContainer,
    config_type: type,
    group_of: Callable[[str], argparse._ActionsContainer | None] | None = None,
) -> None:
    """Adds one flag per field of `config_type`, nested dataclasses included.

    `group_of` returns the group of the parser that a field's flag belongs to, or None if it is left out.
    """
    hints = typing.get_type_hints(config_type)
    for spec in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[spec.name]):
            add_flags(parser, typing.cast(type, hints[spec.name]), group_of)
            continue
        group = parser if group_of is None else group_of(spec.name)
        if group is None:
            continue
        names = [flag_name(spec.name), *spec.metadata["aliases"]]
        options: dict[str, Any] = {"dest": spec.name, "default": spec.default, "help": _help_of(spec)}
        if hints[spec.name] is bool:
            options["action"] = "store_true"
        elif spec.metadata["words"]:
            options |= {"nargs": "*", "metavar": spec.name.upper()}
        else:
            same, parse = spec.metadata["same"], _parser_of(hints[spec.name])
            options["type"] = functools.partial(_same_as, same, parse) if same else parse
            options["choices"] = spec.metadata["choices"] or None
        group.add_argument(*names, **options)


def from_flags(config_type: type[ConfigT], args: argparse.Namespace) -> ConfigT:
    """Builds `config_type` from parsed flags. Raises `ConfigError` for values out of range."""
    hints = typing.get_type_hints(config_type)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(typing.cast(Any, config_type)):
        nested = hints[spec.name]
        if dataclasses.is_dataclass(nested):
            values[spec.name] = from_flags(typing.cast(type, nested), args)
        else:
            value = getattr(args, spec.name)
            values[spec.name] = tuple(value) if spec.metadata["words"] else value
    return config_type(**values)


def fields_of(config_type: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of `config_type`, also for names and words that other servers have for flags.

    None is the default, as in vLLM, whose programs pass on all that they were given. Raises `ConfigError` for a name
    that is none, with what to give, and for a value of another type.
    """
    names: dict[str, str] = {}  # to its field
    parts: dict[str, str] = {}  # field of a nested configuration -> how to give it
    hints = typing.get_type_hints(config_type)
    specs = {spec.name: spec for spec in dataclasses.fields(config_type)}
    for spec in specs.values():
        nested = hints[spec.name]
        if dataclasses.is_dataclass(nested):
            kind = typing.cast(type, nested)
            whole, where = f"{spec.name}={kind.__name__}", f", from {kind.__module__}"
            parts |= {name: f"{whole}({name}=...){where}" for name in fields_by_name(nested)}
            names[spec.name] = spec.name
    names |= fields_by_name(config_type)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"{name} is no argument: {_way_out(name, list(names), parts)}")
        if names[name] in fields:
            raise ConfigError(f"{name} and another name of {names[name]} are both given: give one of them")
        if value is not None:
            fields[names[name]] = _value_of(specs[names[name]], hints[names[name]], name, value)
    return fields


def _value_of(spec: dataclasses.Field[Any], hint: Any, name: str, value: Any) -> Any:
    """Returns an argument as its field holds it. Raises `ConfigError` for one of another type."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # NumPy's
    if spec.metadata.get("choices") and isinstance(value, str):  # `check_choices` lists those that are allowed
        return spec.metadata["same"].get(value, value)
    if not isinstance(value, Mapping):  # of which msgspec would make a nested configuration
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(value, hint)
    raise ConfigError(f"{name} is {value!r:.100}, but must be of type {spec.type}")


def fields_by_name(config_type: Any) -> dict[str, str]:
    """Returns the fields that are flags, by their names and those that other servers have for them."""
    return {
        name.lstrip("-").replace("-", "_"): spec.name
        for spec in dataclasses.fields(config_type)
        if "aliases" in spec.metadata
        for name in (spec.name, *spec.metadata["aliases"])
    }


def _way_out(name: str, names: list[str], parts: Mapping[str, str]) -> str:
    if name in parts:
        return f"give {parts[name]}"
    near = difflib.get_close_matches(name, names, n=1, cutoff=LEAST_LIKENESS)
    return f"is it {near[0]}?" if near else "leave it out (docs/flags.md)"


def public_flags(config: Any) -> dict[str, Any]:
    """Returns the values of all flags of `config` but the secret ones; a nested configuration as a dict of its own."""
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            values[spec.name] = public_flags(value)
        elif not spec.metadata["secret"]:
            values[spec.name] = value
    return values


def _help_of(spec: dataclasses.Field[Any]) -> str:
    """Returns the field's text, with its default where the text doesn't say it."""
    text: str = spec.metadata["help"]
    if spec.default in (None, False, ()) or "default" in text or spec.metadata["secret"]:
        return text
    return f"{text} (default: {spec.default})"


def _parser_of(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        words = [word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
        (hint,) = (part for part in parts if typing.get_origin(part) is not typing.Literal)
        if words:
            return functools.partial(_word_or, words, hint)
    if typing.get_origin(hint) is tuple:
        return functools.partial(_list_of, typing.get_args(hint)[0])
    return _integer if hint is int else hint


def _integer(text: str) -> int:
    """Reads an integer, with vLLM's units: 32k and 1.5m are 32000 and 1500000, 32K is 32768."""
    number, unit = text[:-1], text[-1:]
    if unit in _UNITS and number.replace(".", "", unit.islower()).isdigit():
        return round(float(number) * _UNITS[unit])
    return int(text)


_integer.__name__ = "int"  # in argparse's errors
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _word_or(words: list[str], kind: type, text: str) -> Any:
    """Reads one of `words` or a value of `kind`."""
    if text in words:
        return text
    try:
        return kind(text)
    except ValueError as error:
        message = f"{text!r} is neither {' nor '.join(words)} nor of type {kind.__name__}"
        raise argparse.ArgumentTypeError(message) from error


def _same_as(same: Mapping[str, str], parse: Callable[[str], Any], text: str) -> Any:
    """Reads a value, or another word for it."""
    return parse(same.get(text, text))


def _list_of(kind: type, text: str) -> tuple[Any, ...]:
    """Reads values with commas between."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        message = f"{text!r} is no list of type {kind.__name__}: give one as 1,2,4"
        raise argparse.ArgumentTypeError(message) from error


def flag_name(field_name: str) -> str:
    """Returns the flag of a field: `--page-size` of `page_size`."""
    return "--" + field_name.replace("_", "-")


def check_choices(config: Any) -> None:
    """Raises `ConfigError` for a flag whose value is none of its choices."""
    for spec in dataclasses.fields(config):
        allowed = spec.metadata.get("choices") or ()
        value = getattr(config, spec.name)
        if value is None and spec.default is None:
            continue
        require(not allowed or value in allowed, flag_name(spec.name), value, f"one of {', '.join(allowed)}")


def check_finite(config: Any) -> None:
    """Raises `ConfigError` for an infinite number: processes send each other flags as JSON, which has none."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            check_finite(value)
        else:
            finite = not isinstance(value, float) or math.isfinite(value)
            require(finite, flag_name(spec.name), value, "a finite number")


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises `ConfigError`, which names the flag, its value and what is allowed, unless `ok`."""
    if not ok:
        raise ConfigError(f"{name} is {value}, but must be {allowed}")
