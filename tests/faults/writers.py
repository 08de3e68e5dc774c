"""Writes what must survive a crash, twice each: run by `Commands` as a program."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pretrain.common import checkpoint
from pretrain.common.run_folder import write_json


def main(argv: list[str] | None = None) -> None:
    what, folder = (argv or sys.argv[1:])[0], Path.cwd()
    for step in (1, 2, 3):
        if what == "checkpoint":
            path = checkpoint.path_of_step(folder, step)
            checkpoint.save(path, {"step": step, "state_dict": {"w": torch.full((64,), float(step))}})
            checkpoint.prune(folder, 1, path)
        else:
            write_json(folder / "results.json", {"step": step})
