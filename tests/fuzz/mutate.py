"""Mutations of files and of what is in them; the same generator gives the same ones."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, "", " ", "x", "\x00", "../../x", "a" * 10_000, "é\u202e", "1e400", "nan", "None", "[", "%s%n", "{seed}",
    0, 1, -1, 2**64, 0.0, 1e-320, math.inf, math.nan, [], {}, [[]], [None], {"": None}, {"a": {"a": {}}}, [0] * 1000,
)  # fmt: skip
_WORDS = (b"\x00" * 8, b"\xff" * 8, b"\n", b"'", b"{", b"]", b": ", b"!!python/name:os.system", b"&a *a", b"9" * 400,
          b"\xef\xbb\xbf", b"<<: ")  # fmt: skip


def value(rng: random.Random, given: Any) -> Any:
    """A copy of nested dictionaries and lists with one to three places changed."""
    root = [copy.deepcopy(given)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(root))
        container, key = rng.choice(places)
        other, name = rng.choice(places)
        how = rng.randrange(5)
        if how == 0 and container is not root:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[rng.choice(("x", "", f"{key}x", str(key).lower()))] = container.pop(key)
        elif how == 2:
            container[key] = copy.deepcopy(other[name])
        elif how == 3 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
            at = container[key]
            container[key] = rng.choice((-at, at + 1, at * 1e6, str(at), [at], at / 3, float(min(at, 2**63))))
        else:
            container[key] = copy.deepcopy(rng.choice(NASTY))
    return root[0]


def data(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of ``seeds`` with one to four changes of bytes."""
    changed = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, size = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 16, 256))
        how = rng.randrange(5)
        if how == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif how == 1:
            changed[at : at + size] = rng.randbytes(size)
        elif how == 2:
            changed[at : at + size] = b""
        elif how == 3:
            changed[at:at] = rng.choice((*_WORDS, bytes(changed[at : at + size])))
        else:
            del changed[at:]
    return bytes(changed)


def _places(container: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested dictionaries and lists."""
    if not isinstance(container, (dict, list)):
        return []
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    return [place for key in keys for place in ((container, key), *_places(container[key]))]
