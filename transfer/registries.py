"""Registries of user modules (`pretrain.common.config.extensions`): the names that a config uses -> functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

# The value of INPUT.MAPPER -> function of (config, is_train) that returns what maps a record of the data set to the
# model's input, as Detectron2's DatasetMapper does, for the Detectron2 engine. It draws from NumPy's global generator,
# whose state is a function of the seed and the image's position, so that a resumed run equals an uninterrupted one.
MAPPERS: dict[str, Callable[[CfgNode, bool], Callable[[dict[str, Any]], dict[str, Any]]]] = {}

# A name in SOLVER.HOOKS -> function of the config that returns a hook of Detectron2's (HookBase), or an object with
# some of its methods. It is called before checkpoints, evaluation and metrics.json, on every rank; its ``trainer`` is
# `transfer.trainer.Trainer`.
HOOKS: dict[str, Callable[[CfgNode], Any]] = {}
