"""Class names that people take for the same one, such as Cat and cat."""

import logging
import unicodedata
from collections.abc import Sequence

from ..errors import shorten_list

log = logging.getLogger(__name__)


def warn_of_alike(names: Sequence[str], where: str) -> None:
    """Log the names that differ only in case, blanks or the Unicode form of their letters; ``where`` has them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(unicodedata.normalize("NFC", name).casefold().split()), []).append(name)
    alike = [_describe(group) for group in groups.values() if len(group) > 1]
    if alike:
        text = f"{where}: {shorten_list(alike)} are separate classes; if they mean the same, give them one name"
        log.warning(text, extra={"once": f"classes of {where}"})


def _describe(names: Sequence[str]) -> str:
    """Join names, in ASCII if they would look the same."""
    is_same = len({unicodedata.normalize("NFC", name) for name in names}) < len(names)
    return " and ".join(map(ascii if is_same else repr, names))
