"""Writes three checkpoints, each of which must survive a crash: run by `Commands` as a program."""

from __future__ import annotations

from pathlib import Path

import torch

from pretrain.common.weights import checkpoint


def main(_: list[str] | None = None) -> None:
    for step in (1, 2, 3):
        path = checkpoint.path_of_step(Path.cwd(), step)
        checkpoint.save(path, {"step": step, "state_dict": {"w": torch.full((64,), float(step))}})
        checkpoint.prune(Path.cwd(), 1, path)
