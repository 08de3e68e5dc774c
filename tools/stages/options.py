"""Options of a command as the fields of a dataclass, from which its command line follows."""

import argparse
from collections.abc import Collection
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def option(
    text: str, default: Any = MISSING, *, is_exclusive: bool = False, minimum: int | None = None, **argument: Any
) -> Any:
    """Return a field of a dataclass that is an option of the command line, too; without a ``default``, a required one.

    Args:
        text: its help.
        is_exclusive: exactly one of the exclusive options has to be given.
        minimum: its least value; it makes the option a whole number.
        argument: arguments of `argparse.ArgumentParser.add_argument`, and ``is_positional`` for one without dashes.
    """
    argument = {"help": text, "type": str if minimum is None else int, **argument}
    metadata = {"argument": argument, "type": argument["type"], "is_exclusive": is_exclusive, "minimum": minimum}
    return field(default=default, metadata=metadata)


def add_arguments(parser: argparse._ActionsContainer, options: type, skip: Collection[str] = ()) -> None:
    """Add an argument for each field of a dataclass that is an `option`, except those named in ``skip``.

    An option that is not given is missing in the parsed command line; its default is that of the field.
    """
    group: Any = None
    for item in fields(options):
        if "argument" not in item.metadata or item.name in skip:
            continue
        argument = {"default": argparse.SUPPRESS, **item.metadata["argument"]}
        target = parser
        if item.metadata.get("is_exclusive"):
            group = group or parser.add_mutually_exclusive_group(required=True)
            target = group
        if argument.pop("is_positional", False):
            target.add_argument(item.name, **argument)
            continue
        if item.default is False:
            argument["action"] = "store_true"
            del argument["type"]
        if item.default is MISSING and item.default_factory is MISSING:
            argument["required"] = True
        target.add_argument(f"--{item.name.replace('_', '-')}", **argument)


def read_arguments(options: type[T], args: argparse.Namespace) -> T:
    """Return the options of a parsed command line."""
    names = {item.name for item in fields(options)}  # pyright: ignore
    return build_options(options, {name: value for name, value in vars(args).items() if name in names})


def build_options(options: type[T], values: dict[str, Any]) -> T:
    """Return options with ``values`` as a record or a parsed command line has them: lists where fields have tuples."""
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
