"""METHODS: the objectives by name, and which config keys feed their keyword-only hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .common import Objective
from .jcl import jcl
from .moco import moco
from .multikey import multikey
from .ressl import ressl
from .sce import sce
from .simclr import simclr
from .supcon import supcon
from .tcl import tcl


@dataclass(frozen=True)
class Method:
    """One line of METHODS.

    Attributes:
        objective: the pure function.
        kind: ``queue``: objective(q_ND, keys_MND, queue_DK, **hyper); the keys come from the momentum encoder.
            ``batch``: objective(anchors_AD, candidates_BD, anchor_labels_A, candidate_labels_B, self_index_A, **hyper);
            every view goes through the one encoder, and there is no queue and no momentum encoder.
        hyper: keyword of the objective -> config key that feeds it.
        many_keys: takes M' > 1 positive keys.
    """

    objective: Callable[..., Objective]
    kind: str
    hyper: Mapping[str, str] = field(default_factory=dict)
    many_keys: bool = False


_TAU = {"temperature": "METHOD.TEMPERATURE"}
_KEY_TAU = {"key_temperature": "METHOD.KEY_TEMPERATURE"}

METHODS: dict[str, Method] = {
    "mocov1": Method(moco, "queue", _TAU),
    "mocov2": Method(moco, "queue", _TAU),
    "multikey": Method(multikey, "queue", _TAU, many_keys=True),
    "jcl": Method(jcl, "queue", {**_TAU, "lambda_": "METHOD.LAMBDA"}, many_keys=True),
    "sce": Method(
        sce, "queue", {**_TAU, **_KEY_TAU, "lambda_": "METHOD.LAMBDA", "mask_positive": "METHOD.MASK_POSITIVE"}
    ),
    "ressl": Method(ressl, "queue", {**_TAU, **_KEY_TAU}),
    "tcl": Method(tcl, "batch", {**_TAU, "k1": "METHOD.K1", "k2": "METHOD.K2"}),
    "supcon": Method(supcon, "batch", _TAU),
    "simclr": Method(simclr, "batch", _TAU),
}

__all__ = ["METHODS", "Method", "Objective"]
