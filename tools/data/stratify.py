"""Division of images, or of groups of images, into train and val with equal proportions of the classes."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

_ROUNDS = 100  # in which groups are exchanged between train and val
_CANDIDATES = 64  # groups of each split that a round considers


def stratify(
    classes_of: Mapping[Hashable, set[Any]], count: int, seed: int, group_of: Mapping[Any, str] | None = None
) -> set[Any]:
    """Choose ``count`` images for val by iterative stratification (Sechidis et al., ECML PKDD 2011, Algorithm 1).

    The class with the fewest remaining images comes next. Each of these, in an order drawn from ``seed``, goes to the
    split that lacks most images of this class, among equals to the split that lacks most images, and never to a full
    split. A split lacks its fraction of the class's images minus those that it has. Images without a class come last.

    With ``group_of``, which maps each image to its group, whole groups are moved in this way, large ones first, and
    exchanged afterwards as long as the splits come closer to their fractions; val has about ``count`` images.
    """
    images = list(classes_of)
    order = [images[position] for position in np.random.default_rng(seed).permutation(len(images))]
    members: dict[Hashable, list[Any]] = defaultdict(list)
    for image in order:
        members[group_of[image] if group_of else image].append(image)
    units = sorted(members, key=lambda unit: len(members[unit]), reverse=True)
    counts = {unit: Counter(label for image in members[unit] for label in classes_of[image]) for unit in units}
    is_val = _distribute({unit: len(members[unit]) for unit in units}, counts, count)
    if group_of:
        labels = sorted(set().union(*classes_of.values()))
        table = [[len(members[unit]), *(counts[unit][label] for label in labels)] for unit in units]
        chosen = _exchange(np.array(table), np.array([is_val[unit] for unit in units]), count / len(order), seed)
        is_val = dict(zip(units, chosen.tolist(), strict=True))
    return {image for unit in units if is_val[unit] for image in members[unit]}


def _distribute(
    sizes: Mapping[Hashable, int], counts: Mapping[Hashable, Counter[Any]], count: int
) -> dict[Hashable, bool]:
    """Return whether each unit (an image or a group) goes to val, in the order of `stratify`.

    Args:
        sizes: number of images of each unit.
        counts: number of images with a class, by unit and class.
        count: number of images for val.
    """
    total = sum(sizes.values())
    units_of: dict[Any, list[Hashable]] = defaultdict(list)
    remaining: Counter[Any] = Counter()
    for unit, counter in counts.items():
        remaining.update(counter)
        for label in counter:
            units_of[label].append(unit)
    labels = sorted(remaining)
    room = [total - count, count]  # images that train and val can still take
    lacking = {label: [remaining[label] * size / total for size in room] for label in labels}
    split_of: dict[Hashable, int] = {}
    while labels:
        rarest = min(labels, key=lambda label: remaining[label])
        for unit in units_of[rarest]:
            if unit not in split_of:
                size = sizes[unit]
                split = max((0, 1), key=lambda split: (room[split] >= size, lacking[rarest][split], room[split]))
                split_of[unit] = split
                room[split] -= size
                for label, number in counts[unit].items():
                    lacking[label][split] -= number
                    remaining[label] -= number
        labels.remove(rarest)
    for unit, size in sizes.items():  # without a class
        if unit not in split_of:
            split_of[unit] = int(room[1] >= size)
            room[split_of[unit]] -= size
    return {unit: bool(split) for unit, split in split_of.items()}


def _exchange(counts_GK: np.ndarray, is_val_G: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Move groups or exchange two of them while that brings val closer to its fraction of the images and classes.

    Args:
        counts_GK: images of each group (G), in all and with each class (K - 1).
        is_val_G: the groups of val to begin with; neither split is empty in the result.
        fraction: fraction of the images for val.

    Returns:
        The groups of val, (G,) bool.
    """
    rng = np.random.default_rng(seed)
    # The last row stands for no group, so that a group can move without another one.
    shares_GK = np.vstack([counts_GK, np.zeros_like(counts_GK[:1])]) / counts_GK.sum(0)
    is_val_G = is_val_G.copy()
    nobody = len(is_val_G)

    def measure(val_xK: np.ndarray) -> np.ndarray:
        """Return the distance of the images' fraction, plus the mean distance of the classes' fractions."""
        distance = np.abs(val_xK - fraction)
        is_empty = np.isclose(val_xK[..., 0], 0) | np.isclose(val_xK[..., 0], 1)
        return distance[..., 0] + distance[..., 1:].sum(-1) / max(1, distance.shape[-1] - 1) + np.where(is_empty, 9, 0)

    for _ in range(_ROUNDS):
        sides = [np.flatnonzero(is_val_G == side) for side in (False, True)]
        train, val = [[*rng.permutation(groups)[:_CANDIDATES].tolist(), nobody] for groups in sides]
        val_K = shares_GK[:-1][is_val_G].sum(0)
        costs_TV = measure(val_K + shares_GK[train][:, None] - shares_GK[val][None])
        t, v = np.unravel_index(costs_TV.argmin(), costs_TV.shape)
        if costs_TV[t, v] < measure(val_K) - 1e-9:
            is_val_G[[group for group in (train[t], val[v]) if group != nobody]] ^= True
        elif max(map(len, sides)) <= _CANDIDATES:
            break
    return is_val_G
