"""Mutations of files and of what is in them; the same generator gives the same ones."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, False, "", " ", "x", "\x00", "\x1b[2J", "../../x", "/dev/zero", "a" * 10_000, "é\u202e", "1e400",
    "nan", "None", "[", "%s%n", "{seed}", 0, 1, -1, 2**31, -(2**63), 2**64, 0.0, -0.0, 1e-320, 1e308, math.inf,
    -math.inf, math.nan, [], {}, [[]], [None], {"": None}, {"a": {"a": {"a": {}}}}, [0] * 1000,
)  # fmt: skip
_WORDS = (b"\x00" * 8, b"\xff" * 8, b"\n", b"'", b"{", b"}", b"[", b"]", b": ", b"!!python/name:os.system", b"&a *a",
          b"\xef\xbb\xbf", b"\x80\x02", b"PK\x03\x04", b"9" * 400, b"1e999", b"NaN", b"<<: ", b"\\u0000",
          b"../")  # fmt: skip


def value(rng: random.Random, given: Any) -> Any:
    """A copy of nested dictionaries and lists with one to three places changed."""
    root = [copy.copy(given) if not isinstance(given, (dict, list)) else _copied(given)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(root))
        container, key = rng.choice(places)
        at = container[key]
        how = rng.randrange(7)
        if how <= 2:
            container[key] = _copied(rng.choice([*NASTY, container[rng.choice(_keys(container))]]))
        elif how == 3 and container is not root:
            del container[key]
        elif how == 4 and isinstance(container, dict):
            container[rng.choice(("x", "", "ID", f"{key}x", str(key).lower()))] = container.pop(key)
        elif how == 5:
            other, name = rng.choice(places)
            if name in _keys(other):
                container[key] = _copied(other[name])
        elif isinstance(at, (int, float)) and not isinstance(at, bool) and abs(at) < 1e300:
            container[key] = rng.choice((-at, at + 1, at * 1e6, str(at), [at], at / 3, float(at)))
        elif isinstance(at, str):
            container[key] = data(rng, [at.encode(errors="replace")]).decode(errors="replace")
        elif isinstance(container, list):
            container.insert(key, _copied(at))
        else:
            container[key] = [at]
    return root[0]


def data(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of ``seeds`` with one to four changes of bytes."""
    found = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, size = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 4, 16, 256))
        how = rng.randrange(8)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif how == 1:
            found[at : at + size] = rng.randbytes(size)
        elif how == 2:
            del found[at : at + size]
        elif how == 3:
            found[at:at] = rng.choice(_WORDS)
        elif how == 4:
            del found[at:]
        elif how == 5:
            found[at:at] = found[at : at + size] * rng.choice((1, 2, 50))
        elif how == 6:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            found[at : at + size] = other[start : start + size]
        else:
            found[at : at + size] = bytes(len(found[at : at + size]))
    return bytes(found)


def _places(root: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested dictionaries and lists."""
    found, waiting = [], [root]
    while waiting:
        container = waiting.pop()
        for key in _keys(container):
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                waiting.append(container[key])
    return found


def _keys(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def _copied(given: Any) -> Any:
    """A deep copy of dictionaries and lists."""
    if isinstance(given, dict):
        return {key: _copied(one) for key, one in given.items()}
    return [_copied(one) for one in given] if isinstance(given, list) else given
