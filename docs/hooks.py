"""What `make site` adds to the pages of this folder: pages from above it, notebooks, and the files that they link to.

mkdocs calls the functions whose names begin with ``on_``. On a code host, pages link to files of the repository; on the
site, such a link leads to a page that shows the file.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_ABOVE = {name: f"{name[:-3].lower()}.md" for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
_ABOVE |= {"README.md": "index.md", "studies/README.md": "studies/index.md", "studies/plan.md": "studies/plan.md"}
for _path in ROOT.glob("studies/*/README.md"):
    _ABOVE[f"studies/{_path.parent.name}/README.md"] = f"studies/{_path.parent.name}.md"
_SOURCES = {page: path for path, page in _ABOVE.items()}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
_CELL = re.compile(r"<t[hd][ >].*?</t[hd]>", re.DOTALL)
_NAME = re.compile(r"(\(?)(<a [^>]*>(\w+)</a>|<code>([^<]+)</code>)([,.;:)]*)")
_CODE = re.compile(r"(?<=<code>)(?:[^<]|<wbr>|<span class=.word.>|</span>)+(?=</code>)")
_OPTION = re.compile(r"(?<![^\s=>])--?[a-z][\w-]*")
_PROGRESS = re.compile(r"(?m)^(.* step \d+/\d+ .*\n)(?:.* step \d+/\d+ .*\n)+(?=.* step \d+/\d+ )")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
_FOUND_FIRST = ("can_i.md", "costs.md")  # by the search: they answer questions in the words of those who ask
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_WIDE = "---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages from above docs/, one for each notebook, and one for every other file that a page links to."""
    for name, page in _ABOVE.items():
        header = _NOT_SEARCHED if name.startswith("studies/") else ""
        files.append(File.generated(config, page, content=header + (ROOT / name).read_text(encoding="utf-8")))
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_render_notebook(path)))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    linked = {_in_repository(page, link) for page, text in pages for link in _LINK.findall(text)}
    for path in sorted(path for path in linked if _on_site(path).startswith("source/")):
        files.append(File.generated(config, _on_site(path), content=_shown(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links relative to the page's place on the site, and let the search rank pages."""
    here = page.file.src_uri
    if here in _FOUND_FIRST:
        page.meta["search"] = {"boost": 3}
    if here.startswith("source/"):
        return markdown
    folder = posixpath.dirname(here) or "."
    return _LINK.sub(lambda link: posixpath.relpath(_on_site(_in_repository(here, link[0])), folder), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let names in tables break after dots and underscores where they do not fit, but no option and no interval."""
    html = _CELL.sub(lambda cell: _break_cell(cell[0]), html)
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def _break_cell(cell: str) -> str:
    return _NAME.sub(_break_name, cell).replace(" ± ", "&nbsp;±&nbsp;")


def _break_name(match: re.Match[str]) -> str:
    """Let a link or code break, with the marks around it; of a command, each word."""
    opening, element, linked, code, closing = match.groups()
    text = linked or code
    if " " in text:
        words = [f'<span class="word">{_allow_breaks(word)}</span>' for word in text.split(" ")]
        return f"{opening}<code>{' '.join(words)}</code>{closing}"
    element = element.replace(f">{text}<", f">{_allow_breaks(text)}<")
    return f'<span class="word">{opening}{element}{closing}</span>'


def _allow_breaks(word: str) -> str:
    """Let a word break after dots and underscores, but not in a number."""
    return re.sub(r"(?<=\w[._])(?=\w)(?<!\d\.(?=\d))", "<wbr>", word)


def _in_repository(page: str, link: str) -> str:
    """Return the path in the repository of what a page links to."""
    folder = posixpath.dirname(_SOURCES.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(folder, link))


def _on_site(path: str) -> str:
    """Return the place on the site of a file of the repository."""
    if path in _ABOVE:
        return _ABOVE[path]
    is_own = path.startswith("docs/") and path.endswith((".md", ".png", ".svg", ".jpg"))
    if path.startswith("docs/") and path.endswith(".ipynb"):
        return path.removeprefix("docs/").removesuffix(".ipynb") + ".md"
    return path.removeprefix("docs/") if is_own else f"source/{path}.md"


def _shown(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    language = _LANGUAGES.get(Path(path).suffix, "text")
    title = path.replace("_", r"\_")
    return f"{_WIDE}# {title}\n\n~~~~~{{.{language} .file}}\n{text.rstrip()}\n~~~~~\n"


def _render_notebook(path: Path) -> str:
    """Return a notebook as a page: its texts, its code, and the outputs that are stored in it."""
    blocks = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(text)
        else:
            blocks.append(f"~~~~~{{.python .file}}\n{text}\n~~~~~")
            blocks += map(_render_output, cell["outputs"])
    return "\n\n".join(blocks) + "\n"


def _render_output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f"![What the cell above shows](data:image/png;base64,{''.join(data['image/png'].split())})"
    text = _PROGRESS.sub(r"\1...\n", "".join(data["text/plain"]))
    return f"~~~~~{{.text .file .output}}\n{text.rstrip()}\n~~~~~"
