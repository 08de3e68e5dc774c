"""Config keys on a command line: KEY VALUE pairs among the options, and --help-keys, which lists the keys."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UserError, suggest_name
from . import extensions
from .keys import Key, find_similar, index_keys


class _ListKeys(argparse.Action):
    """The argparse action of --help-keys; ``const`` returns the keys."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        with extensions.using(getattr(namespace, "extensions", None) or []):  # from an --import before this option
            print(describe(self.const(), values if isinstance(values, str) else ""))
        parser.exit()


def add_keys(parser: argparse.ArgumentParser, keys: Callable[[], Sequence[Key]]) -> None:
    """Add --help-keys to a command that takes KEY VALUE pairs, and explain them in its help.

    Args:
        keys: returns the keys; called only to list them, or if a user writes one as an option.
    """
    description = "KEY VALUE ... after or between the options override the config, as in SOLVER.BASE_LR 0.05 SEED 1"
    group = parser.add_argument_group("config keys", description)
    text = "list the keys (those that begin with PREFIX, such as SOLVER): default, values and meaning"
    group.add_argument("--help-keys", action=_ListKeys, nargs="?", const=keys, metavar="PREFIX", help=text)


def add_usage(parser: argparse.ArgumentParser) -> None:
    """End the parser's usage with KEY VALUE; call it after all options are added."""
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [KEY VALUE ...]"


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line into options and KEY VALUE pairs; raise UserError for an unknown option."""
    args, words = parser.parse_known_args(argv)
    check_options(words, parser)
    return args, words


def check_options(words: Sequence[str], parser: argparse.ArgumentParser, command: str = "") -> None:
    """Raise UserError for a word that looks like an option; name the keys of this ending, or a similar option."""
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
            known = [flag for action in parser._actions for flag in action.option_strings]
            keys = [key for action in parser._actions if isinstance(action, _ListKeys) for key in action.const()]
            matching = [key.name for key in find_similar(option.removeprefix("--"), index_keys(keys))]
            keys_hint = f"; config keys take no dashes: write {' VALUE or '.join(matching)} VALUE"
            hint = keys_hint if matching else suggest_name(option, known)
            raise UserError(f"{command or parser.prog}: unknown option {word!r}{hint}")


def describe(keys: Sequence[Key], prefix: str) -> str:
    """Describe the keys that begin with ``prefix``: for each a line with default and values, and its meaning below."""
    prefix = prefix.upper()
    listed = [key for key in keys if key.name.startswith(prefix)]
    if not listed:
        raise UserError(f"no config key begins with {prefix}; --help-keys alone lists all")
    lines = []
    for key in listed:
        values = key.describe_values()
        limits = f"  ({values})" if values else ""
        lines += [f"{key.name} {format_value(key.default)}{limits}"]
        lines += textwrap.wrap(" ".join(key.meaning.split()), 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """Format a value as it is typed after its key."""
    text = str(list(value) if isinstance(value, tuple) else value)
    return f"'{text}'" if not text or " " in text else text
