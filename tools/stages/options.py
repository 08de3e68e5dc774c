"""Options of a command as the fields of a dataclass, from which its command line follows."""

import argparse
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def option(text: str, default: Any = MISSING, *, is_exclusive: bool = False, **argument: Any) -> Any:
    """Return a field of a dataclass that is an option of the command line, too; without a ``default``, a required one.

    Args:
        text: its help.
        is_exclusive: exactly one of the exclusive options has to be given.
        argument: arguments of `argparse.ArgumentParser.add_argument`, and ``is_positional`` for one without dashes.
    """
    return field(default=default, metadata={"argument": {"help": text, **argument}, "is_exclusive": is_exclusive})


def add_arguments(parser: argparse.ArgumentParser, options: type) -> None:
    """Add an argument for each field of a dataclass that is an `option`."""
    group: Any = None
    for item in fields(options):
        if "argument" not in item.metadata:
            continue
        argument = dict(item.metadata["argument"])
        if item.metadata["is_exclusive"]:
            group = group or parser.add_mutually_exclusive_group(required=True)
        target = group if item.metadata["is_exclusive"] else parser
        if argument.pop("is_positional", False):
            target.add_argument(item.name, **argument)
            continue
        if item.default is MISSING:
            argument["required"] = True
        elif item.default is False:
            argument["action"] = "store_true"
        else:
            argument["default"] = list(item.default) if isinstance(item.default, tuple) else item.default
        target.add_argument(f"--{item.name.replace('_', '-')}", **argument)


def read_arguments(options: type[T], args: argparse.Namespace) -> T:
    """Return the options of a parsed command line."""
    return from_json(options, {item.name: getattr(args, item.name) for item in fields(options)})  # pyright: ignore


def from_json(options: type[T], values: dict[str, Any]) -> T:
    """Return options with ``values`` as JSON or argparse has them: lists where the fields have tuples."""
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
