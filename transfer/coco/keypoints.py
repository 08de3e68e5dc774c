"""Left/right keypoint pairs for horizontal flips: one rule for both engines."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = re.compile(r"left|right|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", re.ASCII)
_OTHER_SIDE = {"l": "r", "r": "l", "left": "right", "right": "left"}


def list_named_keypoints(content: Mapping[str, Any]) -> list[str]:
    """Return the keypoints' names in a COCO file, or [] if its categories do not name them."""
    categories = sorted(content["categories"], key=lambda category: category["id"])
    return [str(name) for name in next((c["keypoints"] for c in categories if c.get("keypoints")), [])]


def keypoint_names(content: Mapping[str, Any]) -> list[str]:
    """Return the keypoints' names in a COCO file, or their numbers if its categories do not name them."""
    points = next((a["keypoints"] for a in content["annotations"] if a.get("keypoints")), [])
    return list_named_keypoints(content) or [str(index) for index in range(len(points) // 3)]


def flip_pairs(content: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Find the pairs of keypoint names that a flip exchanges.

    They are the category's `flip`, or follow from the names (left_eye, LeftEye, L_eye, l_eye).

    Returns:
        The pairs, or None if they are unknown: no name has a side, one has a side without its counterpart, or `flip`
        is not pairs of names.
    """
    names = keypoint_names(content)
    flip = next((c["flip"] for c in content["categories"] if c.get("keypoints") and "flip" in c), None)
    if flip is not None:
        is_valid = all(isinstance(pair, list) and len(pair) == 2 and {*map(str, pair)} <= {*names} for pair in flip)
        return [(str(left), str(right)) for left, right in flip] if is_valid else None
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
    """Return whether the pairs are known, and are at the same positions in all categories that name their keypoints."""
    contents = [{**content, "categories": [c]} for c in content["categories"] if c.get("keypoints")] or [content]
    pairs = [flip_pairs(single) for single in contents]
    if None in pairs:
        return False
    orders = [flip_indices(keypoint_names(single), p or ()) for single, p in zip(contents, pairs, strict=True)]
    return all(order == orders[0] for order in orders)


def flip_indices(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[int]:
    """Return the index of every keypoint's mirror image."""
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    return [names.index(other.get(name, name)) for name in names]
