"""Every command in the documentation is one that its program accepts, and every link has a target."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import load_config
from tools.launcher import stages
from transfer.config import load_config as load_detector_config

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# At the start of an indented line or of code within a line; what a file is called is no command.
START = r"(?:^ {4,}|`)(?:python )?"
PROGRAM = r"(?P<program>tools/\w+\.py|transfer/train_net\.py|launch\.py) (?P<words>[^`\n]+)"


def commands() -> list[tuple[str, str]]:
    """Programs as paths, with the words of their command lines."""
    found = set()
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names commands, also former ones
            continue
        text = re.sub(r" \\\n +", " ", page.read_text())
        for match in re.finditer(START + PROGRAM, text, re.MULTILINE):
            program = match["program"]
            found.add(("tools/launch.py" if program == "launch.py" else program, match["words"].strip()))
    return sorted(found)


class Parsed(Exception):
    """Ends a program once it has parsed its command line."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, open_calls = argparse.ArgumentParser.parse_known_args, []

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        open_calls.append(self)
        parsed = parse(self, *args, **kwargs)  # calls this function for a subcommand
        open_calls.pop()
        if open_calls:
            return parsed
        raise Parsed(*parsed)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def test_there_are_commands() -> None:
    programs = {program for program, _ in commands()}
    assert len(commands()) > 30 and {"tools/launch.py", "tools/convert_to_d2.py", "transfer/train_net.py"} <= programs


@pytest.mark.parametrize(("program", "words"), commands())
def test_a_command_is_accepted(program: str, words: str, only_parse: None) -> None:
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    try:
        module.main(shlex.split(words, comments=True))
    except Parsed as parsed:
        args, rest = parsed.args
    except SystemExit as end:
        assert end.code == 0, words  # --help
        return
    keys = [*getattr(args, "opts", []), *rest]
    assert not [word for word in keys if word.startswith("--")], words
    if getattr(args, "extensions", []):  # the templates have tests of their own
        return
    detector = program == "transfer/train_net.py"
    assert not keys or detector or getattr(args, "takes_overrides", False), words
    if detector or getattr(args, "command", "") == "transfer":
        load_detector_config(ROOT / args.config_file, keys)
    elif getattr(args, "command", "") == "pretrain" and not args.method.isupper():  # NAME stands for a method
        load_config(ROOT / args.config_file if args.config_file else stages.recipe_of(args.method), keys)


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:^ {4,}|`)make ([\w-]+)", pages, re.MULTILINE))
    assert {"demo", "detectron2", "docs", "test-lowest"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_has_a_target(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
