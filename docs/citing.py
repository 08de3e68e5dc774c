"""BibTeX of this software and the papers behind it, from CITATION.cff: docs/citing.md, written by `make docs`."""

import textwrap
from typing import Any

import yaml

from tools import ROOT

_INTRODUCTION = """\
# Cite

Please cite the papers of the methods that you use, Detectron2 if it trained your detectors, and this software. All
entries are also in [CITATION.cff](../CITATION.cff), from which this page is generated."""
_KINDS = {"software": "misc", "conference-paper": "inproceedings", "article": "article"}


def markdown() -> str:
    """Return the whole page."""
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    works = [content, *content["references"]]
    return "\n\n".join([_INTRODUCTION, *map(_format_entry, works)]) + "\n"


def _format_entry(work: dict[str, Any]) -> str:
    """Return the BibTeX entry of a work, in a block of its own, under the name that users know it by."""
    fields = {
        "title": f"{{{work['title']}}}",
        "author": " and ".join(map(_format_author, work["authors"])),
        "booktitle": work.get("collection-title"),
        "journal": work.get("journal"),
        "pages": f"{work['start']}--{work['end']}" if "start" in work else None,
        "year": work.get("year"),
        "note": f"Version {work['version']}" if "version" in work else None,
        "url": work.get("url"),
    }
    lines = [_wrap(f"{name} = {{{value}}},") for name, value in fields.items() if value is not None]
    heading = f"## {work.get('abbreviation', work['title'])}"
    return "\n".join([heading, "", "```bibtex", f"@{_KINDS[work['type']]}{{{_name_key(work)},", *lines, "}", "```"])


def _wrap(line: str) -> str:
    """Break a line where the site's column ends on a laptop; BibTeX reads the parts as one."""
    return textwrap.fill(line, 75, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _format_author(author: dict[str, str]) -> str:
    return f"{author['family-names']}, {author['given-names']}" if "family-names" in author else f"{{{author['name']}}}"


def _name_key(work: dict[str, Any]) -> str:
    """Return the entry's key, such as he2020moco."""
    if "abbreviation" not in work:
        return str(work["title"]).replace("-", "_")
    family = work["authors"][0]["family-names"].lower()
    return f"{family}{work['year']}{work['abbreviation'].lower().replace(' ', '')}"


if __name__ == "__main__":
    (ROOT / "docs" / "citing.md").write_text(markdown(), encoding="utf-8")
