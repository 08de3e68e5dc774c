"""The snippets and commands of the documentation, which test_docs.py runs or parses."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = r"(?:python )?(?P<program>tools/\w+\.py|transfer/train_net\.py|launch\.py) (?P<words>.+)"


class Snippet(NamedTuple):
    page: Path
    language: str
    text: str

    @property
    def needs(self) -> str:
        """Return the hardware, data or network that the snippet needs."""
        match = re.match(r"# Needs (.+)\.\n", self.text)
        return match[1] if match else ""

    def lines(self) -> list[str]:
        """Return the shell commands, one per line, without comments and with the values of variables."""
        joined = re.sub(r" \\\n +", " ", self.text)
        for name, value in re.findall(r"^(\w+)=(\S+)$", joined, re.MULTILINE):
            joined = joined.replace(f"{name}={value}\n", "").replace(f"${name}", value)
        return [line for line in (re.sub(r"(^| {2,})# .*", "", line) for line in joined.splitlines()) if line]


def snippets(*languages: str) -> list[Snippet]:
    blocks = [
        Snippet(page, *language_and_text)
        for page in PAGES
        for language_and_text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    return [block for block in blocks if not languages or block.language in languages]


def commands() -> list[tuple[str, str]]:
    """Return (path of a program, its arguments) of each command in a snippet or within a line of text."""
    texts = {line for block in snippets("bash") for line in block.lines()}
    for page in PAGES:
        if page.name != "CHANGELOG.md":  # names commands, also former ones
            texts |= set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text()))
    programs = {program_of(text) for text in texts} - {None}
    return sorted(programs)  # type: ignore[type-var]


def program_of(text: str) -> tuple[str, str] | None:
    match = re.fullmatch(PROGRAM, text)
    if not match:
        return None
    program = match["program"]
    return "tools/launch.py" if program == "launch.py" else program, match["words"].strip()


def runnable(page: Path) -> list[Snippet]:
    """Return the snippets of a page of docs/ that need only this machine; those of other pages are targets of make."""
    blocks = [block for block in snippets("bash", "python", "yaml") if block.page == page and page.parent != ROOT]
    return [block for block in blocks if not block.needs]
