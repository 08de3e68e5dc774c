"""What `make site` adds to the pages of this folder: pages from above it, and the reference made from the code.

mkdocs calls the functions whose names begin with ``on_``. On a code host, pages link to files of the repository; on the
site, such a link leads to a page that shows the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pretrain import config as pretraining
from pretrain.common.config_overrides import Key
from tools import benchmark, convert_to_d2, export, launch, make_data, predict, report, show_views
from transfer import config_keys as fine_tuning
from transfer import train_net

ROOT = Path(__file__).resolve().parents[1]
_ABOVE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
          "SECURITY.md": "security.md"}  # fmt: skip
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
_UNTIL_THEN = "*`make site` lists them here.*"  # on a code host
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages from above docs/, and a page for every other file that some page links to."""
    for name, page in _ABOVE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    linked = {_in_repository(page, link) for page, text in pages for link in _LINK.findall(text)}
    for path in sorted(path for path in linked if _on_site(path).startswith("source/")):
        files.append(File.generated(config, _on_site(path), content=_shown(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links relative to the page's place on the site, and fills in the reference."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    for marker, write in REFERENCE.items():
        if (place := f"{marker}\n{_UNTIL_THEN}") in markdown:
            markdown = markdown.replace(place, write())

    def on_site(link: re.Match[str]) -> str:
        return posixpath.relpath(_on_site(_in_repository(here, link[0])), posixpath.dirname(here) or ".")

    return _LINK.sub(on_site, markdown)


def _in_repository(page: str, link: str) -> str:
    """The path in the repository of what a page links to."""
    folder = "" if page in _ABOVE.values() else posixpath.dirname(f"docs/{page}")
    return posixpath.normpath(posixpath.join(folder, link))


def _on_site(path: str) -> str:
    """The place on the site of a file of the repository."""
    if path in _ABOVE:
        return _ABOVE[path]
    is_own = path.startswith("docs/") and path.endswith((".md", ".png", ".svg", ".jpg"))
    return path.removeprefix("docs/") if is_own else f"source/{path}.md"


def _shown(path: str) -> str:
    text, language = (ROOT / path).read_text(encoding="utf-8"), _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n~~~~~{language}\n{text.rstrip()}\n~~~~~\n"


def _keys(described: Callable[[], Sequence[Key]]) -> str:
    """A table per section of the config, with the keys that --help-keys explains."""
    sections: dict[str, list[str]] = {}
    for key in described():
        if key.meaning and not key.meaning.startswith("the torchvision engine takes only"):
            limits = f"; {key.limits}" if key.limits else ""
            cells = (f"`{key.name}`", f"{key.meaning} (default `{key.default!r}`{limits})")
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            section = key.name.split(".")[0] if "." in key.name else "Without a section"
            sections.setdefault(section, ["| key | meaning |", "| --- | --- |"]).append(f"| {row} |")
    return "\n\n".join("\n".join([f"## {name}", "", *rows]) for name, rows in sections.items())


def _commands() -> str:
    """The help of every program; the options that all of the launcher's jobs share come once."""
    parts, shared = ["## tools/launch.py"], ""
    for name in _choices(launch):
        text, _, resources = _help(launch, name).partition("\n\nresources:\n")
        shared = resources or shared
        parts.append(f"### launch.py {name}\n\n{_block(text)}")
    parts.append(f"### Resources, of every command that starts jobs\n\n{_block(shared)}")
    for module in (convert_to_d2, train_net, predict, export, report, show_views):
        parts.append(f"## {_path(module)}\n\n{_block(_help(module))}")
    for module in (make_data, benchmark):
        parts.append(f"## {_path(module)}")
        parts += [
            f"### {Path(_path(module)).name} {name}\n\n{_block(_help(module, name))}" for name in _choices(module)
        ]
    return "\n\n".join(parts)


def _choices(module: Any) -> list[str]:
    """The commands of a program."""
    return [name for action in module._parser()._actions for name in (action.choices or ())]


def _path(module: Any) -> str:
    return f"{module.__name__.replace('.', '/')}.py"


def _help(module: Any, *words: str) -> str:
    """What a program prints with --help, without its usage, which repeats the options."""
    out, columns = io.StringIO(), mock.patch.dict(os.environ, COLUMNS="100")
    with columns, contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        module.main([*words, "--help"])
    return out.getvalue().partition("\n\n")[2].strip()


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


REFERENCE = {
    "<!-- keys of pretraining -->": lambda: _keys(pretraining.described_keys),
    "<!-- keys of fine-tuning -->": lambda: _keys(fine_tuning.described_keys),
    "<!-- commands -->": _commands,
}
