"""Weights & Biases, fed from TensorBoard's events, where P2T_LOGGERS is ``wandb``; WANDB_PROJECT, ... configure it."""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, one_line
from ..files import atomic_write

log = logging.getLogger(__name__)
VARIABLE, RECORD = "P2T_LOGGERS", "wandb_id.txt"


def wanted() -> bool:
    """True if P2T_LOGGERS is ``wandb``; UserError if it is another word, or wandb is not installed."""
    name = os.environ.get(VARIABLE, "").strip()
    if name not in ("", "wandb"):
        raise UserError(f"{VARIABLE} is {name!r}; the only logger is wandb")
    if name and importlib.util.find_spec(name) is None:
        raise UserError(f"{VARIABLE} names wandb, which is not installed; run: pip install wandb")
    return bool(name)


def start(output_dir: str | Path) -> Callable[[], Any]:
    """Starts or continues the run of ``output_dir`` at W&B, before TensorBoard's writer is made; returns what ends it.

    If that fails, the run continues without it, with a warning.
    """
    if not wanted():
        return lambda: None
    folder = Path(output_dir).absolute()
    record, config = folder / RECORD, folder / "config.yaml"
    try:
        import wandb

        if not record.is_file():
            atomic_write(record, uuid.uuid4().hex[:8])
        # Its own folder lies next to the run folder: it copies the events, and would send copies within it again.
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pretrain-to-transfer"), id=record.read_text(),
            name="/".join(folder.parts[-2:]), config=yaml.safe_load(config.read_text()) if config.is_file() else {},
            dir=os.environ.get("WANDB_DIR", str(folder.parent)), resume="allow", reinit="finish_previous",
            sync_tensorboard=True, settings=wandb.Settings(silent=True, console="off"),
        ).finish  # fmt: skip
    except Exception as error:  # whatever the library raises
        log.warning(f"wandb failed: {one_line(error)[:300]}; the run continues without it")
        return lambda: None
