"""Which keypoints change places when an image is flipped: one rule for both engines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = re.compile(r"left|right|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", re.ASCII)
_OTHER_SIDE = {"l": "r", "r": "l", "left": "right", "right": "left"}


def keypoint_names(content: Mapping[str, Any]) -> list[str]:
    """The keypoints' names in a COCO file; their numbers where its categories do not name them."""
    if names := next((c["keypoints"] for c in content["categories"] if c.get("keypoints")), []):
        return [str(name) for name in names]
    points = next((a["keypoints"] for a in content["annotations"] if a.get("keypoints")), [])
    return [str(index) for index in range(len(points) // 3)]


def flip_pairs(content: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Pairs of names that change places: of the category's `flip`, or by name (left_eye, LeftEye, L_eye, l_eye).

    Returns:
        None: unknown, as no name has a side, one has a side without its counterpart, or `flip` is not pairs of names.
    """
    names = keypoint_names(content)
    given = next((c["flip"] for c in content["categories"] if c.get("keypoints") and "flip" in c), None)
    if given is not None:
        is_valid = all(isinstance(pair, list) and len(pair) == 2 and {*map(str, pair)} <= {*names} for pair in given)
        return [(str(left), str(right)) for left, right in given] if is_valid else None
    by_words = {tuple(word.lower() for word in _WORDS.findall(name)): name for name in names}
    pairs = []
    for words, name in by_words.items():
        mirrored = tuple(_OTHER_SIDE.get(word, word) for word in words)
        if mirrored == words:
            continue
        if mirrored not in by_words:
            return None
        if not {"l", "left"}.isdisjoint(words):
            pairs.append((name, by_words[mirrored]))
    return pairs or None


def is_flippable(content: Mapping[str, Any]) -> bool:
    """Whether `flip_pairs` are known and lie at the same places in all categories that name their keypoints."""
    named = [{**content, "categories": [c]} for c in content["categories"] if c.get("keypoints")]
    mirrored = [(pairs := flip_pairs(one)) and mirror(keypoint_names(one), pairs) for one in named or [content]]
    return None not in mirrored and all(order == mirrored[0] for order in mirrored)


def mirror(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[int]:
    """The index of every keypoint's mirror image."""
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    return [names.index(other.get(name, name)) for name in names]
