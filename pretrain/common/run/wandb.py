"""Weights & Biases, fed from TensorBoard's events, where P2T_LOGGERS is ``wandb``; WANDB_PROJECT, ... configure it."""

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
from . import file_names

log = logging.getLogger(__name__)
VARIABLE = "P2T_LOGGERS"
ID_FILE = "wandb_id.txt"  # in the run folder


def check_logger() -> None:
    """Raise UserError if P2T_LOGGERS names another logger than wandb, or wandb is not installed."""
    name = os.environ.get(VARIABLE, "").strip()
    if name not in ("", "wandb"):
        raise UserError(f"{VARIABLE} is {name!r}; the only logger is wandb")
    if name and importlib.util.find_spec(name) is None:
        raise UserError(f"{VARIABLE} names wandb, which is not installed; run: pip install wandb")


def start(output_dir: str | Path) -> Callable[[], Any]:
    """Start or continue the W&B run of ``output_dir`` before TensorBoard's writer exists; return what ends it.

    If that fails, the run continues without it, with a warning.
    """
    if not os.environ.get(VARIABLE, "").strip():
        return lambda: None
    check_logger()
    folder = Path(output_dir).absolute()
    record = folder / ID_FILE
    config = folder / file_names.CONFIG
    try:
        import wandb

        if not record.is_file():
            atomic_write(record, uuid.uuid4().hex[:8])
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pretrain-to-transfer"),
            id=record.read_text(),
            name="/".join(folder.parts[-2:]),
            config=yaml.safe_load(config.read_text()) if config.is_file() else {},
            dir=os.environ.get("WANDB_DIR", str(folder.parent)),  # in the run folder it would upload its own copies
            resume="allow",
            reinit="finish_previous",
            sync_tensorboard=True,
            settings=wandb.Settings(silent=True, console="off"),
        )
        return run.finish
    except Exception as error:  # whatever the library raises
        log.warning(f"wandb failed: {one_line(error)[:300]}; the run continues without it")
        return lambda: None
