"""The reference of commands, keys and layouts, from the code: four pages of docs/reference, written by `make docs`."""

import contextlib
import io
import itertools
import os
import re
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pretrain import keys as pretraining
from pretrain.common.config.keys import Key
from pretrain.common.errors import UserError
from pretrain.common.weights.backbone import extract_backbone
from pretrain.common.weights.file import read_weights_file
from tests.pretrain.common.layouts import LAYOUTS
from tools import benchmark, convert_to_d2, export, launch, make_data, predict, report, show_views
from tools.launcher.commands import list_commands
from transfer import keys as fine_tuning
from transfer import train_net

_FOLDER = Path(__file__).parent / "reference"
_WIDTH = 78  # characters of a line that fits into a column of the site
_MARKER = "<!-- written by make docs -->\n"  # the rest of the page
_COMMAND = re.compile(r" *python ")
_NAME_AND_VALUE = re.compile(r"(--[\w-]+|[A-Z]+\.[A-Z._]+) (?=[^-\s])")  # stay on one line
_FIRST_COLUMN = re.compile(r" +\S+ {2,}(?=\S)")  # of a description's table


def pages() -> dict[Path, str]:
    """Return the whole text of each page."""
    written = {
        "commands": _commands(),
        "pretraining_keys": _keys(pretraining.describe_keys()),
        "detector_keys": _keys(fine_tuning.describe_keys()),
        "layouts": _layouts(),
    }
    return {_FOLDER / f"{name}.md": _introduction(name) + f"{_MARKER}\n{text}\n" for name, text in written.items()}


def _introduction(name: str) -> str:
    """Return the part of a page that is written by hand."""
    return (_FOLDER / f"{name}.md").read_text(encoding="utf-8").partition(_MARKER)[0]


def _keys(described: Sequence[Key]) -> str:
    """Return a table per section of the config, with the keys that --help-keys explains."""
    sections: dict[str, list[str]] = {}
    for key in described:
        if key.meaning and key.meaning != fine_tuning.ONLY_DEFAULT:
            values = key.describe_values()
            limits = f"; {values}" if values else ""
            meaning = " ".join(key.meaning.split()).replace("<", "&lt;")
            cells = (f"`{key.name}`", f"{meaning} (default `{key.default!r}`{limits})")
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            section = key.name.split(".")[0] if "." in key.name else "Without a section"
            sections.setdefault(section, ["| key | meaning |", "| --- | --- |"]).append(f"| {row} |")
    return "\n\n".join("\n".join([f"## {name}", "", *rows]) for name, rows in sections.items())


def _layouts() -> str:
    """Return a table of the files in the layouts of public projects that tests make, and what is read of each."""
    rows = ["| file | read | with `--encoder key` | not read |", "| --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as folder:
        for name, content in sorted(LAYOUTS.items(), key=lambda item: item[0].lower()):
            path = Path(folder, "weights.pth")
            torch.save(content(), path)
            file = read_weights_file(path)
            query = extract_backbone(file)
            key = ""
            with contextlib.suppress(UserError):
                key = f"`{extract_backbone(file, 'key').provenance.prefix}*`"
            unread = ", ".join(f"`{module}`" for module in query.unread.split(", ") if module)
            rows.append(f"| {name} | `{query.provenance.prefix}*` | {key} | {unread} |")
    return "\n".join(rows)


def _commands() -> str:
    """Return the help of every program; options that all of the launcher's jobs share occur once."""
    parts = ["## tools/launch.py"]
    shared = {}
    for name in itertools.chain(*list_commands().values()):
        text, *sections = re.split(r"\n\n(?=config keys:|resources:)", _help(launch, name))
        shared |= {section.partition(":")[0]: section for section in sections}
        parts.append(f"### launch.py {name}\n\n{_block(text)}")
    shared_text = _block("\n\n".join(shared.values()))
    parts.append(f"### Config keys and resources, of every command that starts jobs\n\n{shared_text}")
    for module in (convert_to_d2, train_net, predict, export, report, show_views):
        parts.append(f"## {_path(module)}\n\n{_block(_help(module))}")
    for module in (make_data, benchmark):
        parts.append(f"## {_path(module)}")
        parts += [
            f"### {Path(_path(module)).name} {name}\n\n{_block(_help(module, name))}" for name in _choices(module)
        ]
    return "\n\n".join(parts)


def _choices(module: Any) -> list[str]:
    """Return the commands of a program."""
    return [name for action in module._build_parser()._actions for name in (action.choices or ())]


def _path(module: Any) -> str:
    return f"{module.__name__.replace('.', '/')}.py"


def _help(module: Any, *words: str) -> str:
    """Return what a program prints with --help, without its usage and without --help itself."""
    out = io.StringIO()
    columns = mock.patch.dict(os.environ, COLUMNS=str(_WIDTH + 2))  # argparse leaves two free
    with columns, contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        module.main([*words, "--help"])
    text = re.sub(r"\n  -h, --help .+", "", out.getvalue().partition("\n\n")[2].strip())
    return text.replace("\n\noptions:\n\n", "\n\n").removesuffix("\n\noptions:")


def _block(text: str) -> str:
    return f"```text\n{_wrap(text)}\n```"


def _wrap(text: str) -> str:
    """Wrap the long lines of a program's description, each with the lines that continue it; argparse wraps the rest."""
    groups: list[str] = []
    hang = 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        is_prose = bool(line.strip()) and not _COMMAND.match(line)
        if groups and is_prose and indent == hang and len(groups[-1]) > _WIDTH and not _COMMAND.match(groups[-1]):
            groups[-1] += f" {line.strip()}"
            continue
        groups.append(line)
        first_column = _FIRST_COLUMN.match(line)
        hang = len(first_column[0]) if first_column else indent
    return "\n".join(_wrap_line(group) for group in groups)


def _wrap_line(line: str) -> str:
    """Wrap a line; in a command, each line but the last ends with a backslash."""
    first_column = _FIRST_COLUMN.match(line)
    indent = len(line) - len(line.lstrip())
    is_command = bool(_COMMAND.match(line))
    hang = indent + 2 if is_command else len(first_column[0]) if first_column else indent
    width = _WIDTH - 2 if is_command else _WIDTH
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    line = _NAME_AND_VALUE.sub(r"\1\0", line) if is_command else line
    wrapped = textwrap.wrap(line, width if len(line) > _WIDTH else _WIDTH, subsequent_indent=" " * hang, **options)
    return (" \\\n" if is_command else "\n").join(wrapped).replace("\0", " ")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
