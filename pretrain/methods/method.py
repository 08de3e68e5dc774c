"""Declaration of a method, and the result of its loss function. Command lines read it, so it imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..common.config.keys import Effect, Key
from ..common.config.limits import ABOVE_0, Choice, Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Hyperparameter(Key):
    """A config key ``METHOD.*`` that only some methods read; methods that share a key share its row."""

    effect: Effect = field(default=Effect.RESULT, init=False)


_TAU_MEANING = "tau, which divides the similarities"
TEMPERATURE = Hyperparameter("METHOD.TEMPERATURE", 0.2, ABOVE_0, _TAU_MEANING, aliases="TAU MOCO_T")
NUM_KEYS = Hyperparameter("METHOD.NUM_KEYS", 1, Range(1, 1024), "M', positive keys per image")
_LABELS_MEANING = "index: only views of the same image are positives; class: all images of its class"
LABELS = Hyperparameter("METHOD.LABELS", "index", Choice(("index", "class")), _LABELS_MEANING)


@dataclass(frozen=True)
class Method:
    """Declaration of a method.

    Attributes:
        function: the pure function, or where it is in this package, as in ``jcl:jcl``.
        kind: ``queue``: function(q_ND, keys_MND, queue_DK, **hyper); the keys come from the momentum encoder.
            ``batch``: function(anchors_AD, candidates_BD, anchor_labels_A, candidate_labels_B, self_index_A, **hyper);
            every view goes through one encoder, and there is no queue and no momentum encoder.
        hyper: keyword of the loss function -> the hyperparameter that supplies it.
        many_keys: The method takes METHOD.NUM_KEYS positive keys; others take one.
        supervised: The method can learn from the images' classes (METHOD.LABELS class).
        schedule: (epoch from 0, epochs, hyperparameters as in the config) -> keywords of the loss function in that
            epoch; it may also read hyperparameters that are not keywords. None means that they do not change.
    """

    function: Callable[..., LossOutput] | str
    kind: Literal["queue", "batch"]
    hyper: Mapping[str, Hyperparameter]
    many_keys: bool = False
    supervised: bool = False
    schedule: Callable[[int, int, dict[str, Any]], dict[str, Any]] | None = None

    def load_function(self) -> Callable[..., LossOutput]:
        """Return the pure function; this imports its module and torch."""
        if callable(self.function):
            return self.function
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)

    def hyperparameters(self) -> list[Hyperparameter]:
        """List the config keys that this method reads, among those that only some methods read."""
        keys = list(self.hyper.values())
        if self.many_keys:
            keys.append(NUM_KEYS)
        if self.supervised:
            keys.append(LABELS)
        return keys


class LossOutput(NamedTuple):
    """Result of a method's loss function.

    Attributes:
        loss: scalar, the mean over the N queries (or the A anchors) given.
        enqueue_ND: vectors to push to the queue, detached; None for methods without a queue.
        metrics: named detached scalars (``queue_accuracy`` from 0 to 100, ``positive_similarity``, ...).
    """

    loss: Tensor
    enqueue_ND: Tensor | None
    metrics: dict[str, Tensor]
