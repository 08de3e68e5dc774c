"""Finds the key that explains why a library refuses a config."""

import ast
import enum
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from pretrain.common.config.keys import copy_value, squash
from pretrain.common.config.yaml_io import get
from pretrain.common.errors import one_line, suggest_name

from ..keys import KEYS

_LIBRARIES = {"detectron2", "fvcore", "iopath", "numpy", "PIL", "pretrain", "torch", "torchvision", "transfer", "yacs"}
_MODULES = _LIBRARIES | sys.stdlib_module_names
_LONGEST = 300  # characters of a reason
_LATEST = 8  # keys that are read shortly before a failure


@dataclass(frozen=True)
class Failure:
    """An exception and the frames that it passed, the innermost last."""

    error: Exception

    @cached_property
    def frames(self) -> list[FrameType]:
        return [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]

    @cached_property
    def summary(self) -> traceback.FrameSummary:
        """The innermost frame outside Python's own library."""
        stack = traceback.extract_tb(self.error.__traceback__)
        of_libraries = [row for row, frame in zip(stack, self.frames, strict=True) if _package(frame) in _LIBRARIES]
        return (of_libraries or stack)[-1]

    @cached_property
    def message(self) -> str:
        return one_line(self.error) if str(self.error) else ""

    @cached_property
    def statement(self) -> str:
        """The source of the expression or statement that failed."""
        row = self.summary
        first = row.lineno or 0
        lines = (linecache.getline(row.filename, number) for number in range(first, (row.end_lineno or first) + 1))
        return textwrap.dedent("".join(lines)).strip()

    @property
    def reason(self) -> str:
        """The message or, if that says nothing, the statement; shortened."""
        is_text = re.search(r"[^\W\d]{2}.* ", self.message)
        text = self.message if is_text else " ".join(self.statement.split())
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

    @property
    def is_explicable(self) -> bool:
        """Whether a value can be the reason, not a lack of memory, disk, GPU or package, nor a bug here or in a module.

        This project's own refusals are ValueErrors.
        """
        is_elsewhere = isinstance(self.error, (MemoryError, NameError, NotImplementedError, OSError, ImportError))
        is_elsewhere |= "not implemented" in self.message or "allocate memory" in self.message
        is_own = self.place.partition("/")[0] in ("pretrain", "transfer") and not isinstance(self.error, ValueError)
        return not (is_elsewhere or is_own or self.is_users)

    @property
    def is_users(self) -> bool:
        """Whether a user's module took part, as all code does that is not one of the libraries."""
        return any(_package(frame) not in _MODULES for frame in self.frames)

    @property
    def place(self) -> str:
        """Where it failed: ``detectron2/modeling/backbone/fpn.py, line 115``."""
        parts = Path(self.summary.filename).parts
        start = max((index for index, part in enumerate(parts) if part in _LIBRARIES), default=0)
        return f"{'/'.join(parts[start:])}, line {self.summary.lineno}"

    def is_same(self, other: "Failure") -> bool:
        """Return whether both failed in the same place for the same reason."""
        return (self.place, self.message) == (other.place, other.message)

    def quotes(self, key: str, value: Any) -> bool:
        """Return whether the message has the key's full name, or ends in or quotes its value, a name or list of names.

        A default is a name that was looked up only if something was: a library's own text may contain it.
        """
        if isinstance(value, (list, tuple)):
            return any(isinstance(item, str) and f"'{item}'" in self.message for item in value)
        if key in self.message.split():
            return True
        if not isinstance(value, str) or (value == KEYS[key].default and not self.list_known()):
            return False
        is_last = bool(value) and re.search(rf"(^|\W){re.escape(value)}\W?$", self.message) is not None
        return is_last or f"'{value}'" in self.message or f'"{value}"' in self.message

    def mentions(self, key: str) -> bool:
        """Return whether the text has a key's name: bbox_reg_loss_type, crop_type of CROP.TYPE, or a variable depth."""
        section, _, leaf = key.rpartition(".")
        in_statement = _list_words(self.statement)
        in_text = in_statement | _list_words(self.message)
        if squash(f"{section.rpartition('.')[2]}_{leaf}") in in_text:
            return True
        return squash(leaf) in (in_text if "_" in leaf else in_statement) and leaf != "NAME"

    def list_known(self) -> list[Any]:
        """List what a value was looked up in: a registry, an enumeration, or a list in the failing statement."""
        for value in self.frames[-1].f_locals.values():
            if isinstance(value, Registry):
                return sorted(name for name, _ in value)
            if isinstance(value, type) and issubclass(value, enum.Enum):
                return [member.value for member in value]
        return _list_displayed(self.statement) if isinstance(self.error, (AssertionError, KeyError)) else []

    def list_compared(self) -> list[str]:
        """List the names in the code of the innermost function of Detectron2 or this project: it compares with them."""
        packages = ("detectron2", "transfer")
        code = next(frame.f_code for frame in reversed(self.frames) if _package(frame) in packages)
        return [text for text in code.co_consts if isinstance(text, str) and re.fullmatch(r"[\w.-]+", text)]


def find_missing_package(error: Exception) -> str:
    """Return the name of a package that a library, not a user's module, imports and that is not installed, or ""."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    return "" if "." in name or Failure(error).is_users else name


def explain(error: Exception, cfg: CfgNode, keys: list[str], attempt: Callable[[CfgNode], object]) -> str:
    """Return in one line which key's value is refused, and why; "" if no key explains the error.

    A name that the error quotes was looked up. Otherwise it is the key whose default lets the attempt pass: those that
    the error or the failing statement mention are tried first, then those that were read last. If there is none, it is
    the first of them that lets the attempt fail for another reason.

    Args:
        keys: those that were read until the error, the last one first.
        attempt: repeats with a changed config what failed with ``cfg``.
    """
    failure = Failure(error)
    quoted = [key for key in keys if failure.quotes(key, get(cfg, key))]
    if quoted and (failure.list_known() or not failure.is_users):  # a user's own text may contain any name
        return _describe(quoted[0], get(cfg, quoted[0]), failure)
    if not failure.is_explicable:
        return ""
    mentioned = list(filter(failure.mentions, keys))
    changed = [key for key in keys if copy_value(get(cfg, key)) != KEYS[key].default]
    latest = [key for key in changed if key not in mentioned][:_LATEST]
    unmentioned = [key for key in changed if key not in (*mentioned, *latest)]
    unmentioned.sort(key=lambda key: not isinstance(get(cfg, key), str))  # names decide what else is run
    suspects = [key for key in mentioned if key in changed] + latest
    culprit, changing = _try_defaults([*suspects, *unmentioned], cfg, failure, attempt)
    named = [key for key in mentioned if key in failure.statement]  # in full
    culprit = culprit or next((key for key in (*named, *mentioned, *changing) if key not in unmentioned), "")
    return _describe(culprit, get(cfg, culprit), failure) if culprit else ""


def _try_defaults(
    keys: Iterable[str], cfg: CfgNode, failure: Failure, attempt: Callable[[CfgNode], object]
) -> tuple[str, list[str]]:
    """Return the first key whose default lets the attempt pass, if any, and those that change why it fails."""
    changing = []
    for key in keys:
        changed = cfg.clone()
        changed.defrost()
        section, _, leaf = key.rpartition(".")
        parent = get(changed, section) if section else changed
        parent[leaf] = copy_value(KEYS[key].default)
        try:
            attempt(changed)
            return key, changing
        except Exception as error:
            if not failure.is_same(Failure(error)):
                changing.append(key)
    return "", changing


def _describe(key: str, value: Any, failure: Failure) -> str:
    """Return the refusal of a key's value in one line, with the known names or else the default as the remedy."""
    problem = f"{key} is {copy_value(value)!r}"
    known = failure.list_known()
    if known and type(value) is type(known[0]):
        has_registry = "registry" in failure.message
        hint = ", or --import the module that registers it" if has_registry else ""
        return f"{problem}; choose one of {', '.join(map(str, known))}{hint}{suggest_name(str(value), map(str, known))}"
    remedy = ""
    if isinstance(value, str) and failure.quotes(key, value):
        remedy = suggest_name(value, failure.list_compared())
    default = copy_value(KEYS[key].default)
    remedy = remedy or ("; set another value" if copy_value(value) == default else f"; its default is {default!r}")
    return f"{problem}, which is refused: {failure.reason} ({failure.place}){remedy}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _list_words(text: str) -> set[str]:
    return {squash(word) for word in re.findall(r"\w+", text)}


def _list_displayed(statement: str) -> list[Any]:
    """List the constants of the first dictionary (its keys), set or list in a statement; [] if it is none alone."""
    try:
        tree = ast.parse(statement)
    except SyntaxError:  # part of a statement
        return []
    for node in ast.walk(tree):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        if items and all(isinstance(item, ast.Constant) for item in items):
            return [item.value for item in items if isinstance(item, ast.Constant)]
    return []
