"""Every stage as a command line on tiny data, and what its folder contains when it is complete."""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.common.weights import checkpoint
from pretrain.common.weights.file import compute_tensor_digest, read
from tests.pretrain.runs import overrides
from tests.transfer import tiny_coco
from transfer.training import checkpoints

_CHANGING = re.compile(  # from run to run: times, processes, places
    r"images_per_second|_s$|time|eta|^(git|command|started|updated|ended|host|pid|job|file_sha256|folder|output_dir)$|data_wait|memory|sha256"
)
_LEFT = re.compile(r"^\..*\.tmp|^\.(.+\.)?owner\.|^tmp")
_COUNTS = ("fast_rcnn/", "roi_head/", "rpn/")  # what only Detectron2's model counts
_DIGITS = "digits --images 20 --val-images 10 --scenes 4 --val-scenes 2"
_REPORTS = ("report.md", "report.html")
_HERE = ("--cluster", "local", "--gpus", "0")
_NOT_COMPARED = re.compile(r"^(log\.txt(\.rank\d+)?|environment\.txt|events\.out.*|curves\.png|.*\.html|launch\.json)$")


@dataclass(frozen=True)
class Stage:
    """A stage's command: module, and arguments given the folder to work in and the folder of its inputs."""

    module: str
    arguments: Callable[[Path, Path], list[str]]


def _pretrain(work: Path, data: Path) -> list[str]:
    config = overrides(data / "images", work / "run", "PROBE.KNN_PERIOD", "1")
    return ["pretrain", "--config-file", str(data / "jcl.yaml"), *_HERE, *config]


def _probe(name: str, *more: str) -> Callable[[Path, Path], list[str]]:
    def arguments(work: Path, data: Path) -> list[str]:
        return [name, str(data / "run"), *_HERE, "OUTPUT_DIR", str(work / "run"), *more]

    return arguments


def _detector(engine: str) -> Callable[[Path, Path], list[str]]:
    def arguments(work: Path, data: Path) -> list[str]:
        words = (
            "SOLVER.MAX_ITER 6 SOLVER.CHECKPOINT_PERIOD 2 TEST.PRECISE_BN.ENABLED True TEST.PRECISE_BN.NUM_ITER 2 "
            "TEST.EVAL_PERIOD 2 TEST.BEST bbox/AP"
        )
        name = f"coco:{data / 'coco/annotations.json'}:{data / 'coco'}"
        command = tiny_coco.command(data, name, engine, "--resume", OUTPUT_DIR=str(work / "run"))
        return [*command, *words.split()]

    return arguments


STAGES = {
    "pretrain": Stage("tests.in_process", _pretrain),
    "knn": Stage("tests.in_process", _probe("knn")),
    "linear": Stage(
        "tests.in_process", _probe("linear", "LINEAR.EPOCHS", "3", "LINEAR.STEPS", "[2]", "LINEAR.IMS_PER_BATCH", "16")
    ),
    "embedding": Stage("tests.in_process", _probe("embedding")),
    "convert": Stage("tools.convert_to_d2", lambda work, data: [str(data / "run"), str(work / "weights.pth")]),
    "data": Stage("tools.make_data", lambda work, data: [*_DIGITS.split(), "--output", str(work / "digits")]),
    "torchvision": Stage("transfer.train_net", _detector("torchvision")),
    "detectron2": Stage("transfer.train_net", _detector("detectron2")),
    "report": Stage(
        "tools.report", lambda work, data: [str(data / "run"), *(f"--output={work / name}" for name in _REPORTS)]
    ),
}


def content(folder: Path) -> dict[str, Any]:
    """Return what must be equal after any interruption: relative path -> content without times and paths."""
    contents: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if _NOT_COMPARED.match(path.name):
            contents[name] = None
        elif path.suffix == ".pth":
            contents[name] = _plain(read(path), folder)
        elif path.name == "metrics.json":
            lines = [_plain(json.loads(line), folder) for line in path.read_text().splitlines()]
            results = path.with_name("results.json")
            written = json.loads(results.read_text()) if results.exists() else {}
            is_detectron2 = written.get("engine", {}).get("name") == "detectron2"
            contents[name] = [_without_medians(line) for line in lines] if is_detectron2 else lines
        elif path.suffix == ".json":
            contents[name] = _plain(json.loads(path.read_text()), folder)
        elif path.suffix in (".yaml", ".txt", ".md", ".csv"):
            contents[name] = path.read_text().replace(str(folder), "FOLDER")
        else:
            contents[name] = path.read_bytes()
    return {name: value for name, value in contents.items() if not Path(name).name.startswith("events.out")}


def newest(folder: Path) -> tuple[int, str]:
    """Return the step of the newest undamaged checkpoint (0 if none), and what a run that resumes from it prints."""
    run = folder / "run"
    if (run / "results.json").exists():  # complete
        return sys.maxsize, ""
    pretrained = checkpoint.load_newest(run)
    if pretrained:
        path, saved = pretrained
        name = f"from {path.name} " if "steps_per_epoch" in saved else ""
        return saved["step"], f"resumed {name}at step {saved['step']} of "
    fine_tuned = checkpoints.load_newest_on_all_ranks(run)
    if fine_tuned:
        path, saved = fine_tuned
        shown = Path(path).relative_to(folder)  # where the command runs
        return saved["iteration"] + 1, f"resuming from {shown}\n"
    return 0, ""


def left_over(folder: Path) -> list[str]:
    """Return the files in a folder that a complete run must not leave."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if _LEFT.match(path.name)]


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def left_in_shared_memory(pids: Sequence[int]) -> list[str]:
    """Return the files in /dev/shm with batches of these processes; torch puts the writer's id in their names."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in pids))]


def _without_medians(line: dict[str, Any]) -> dict[str, Any]:
    """Remove Detectron2's medians over 20 iterations from a line, because a resumed run starts new ones."""
    return {key: value for key, value in line.items() if "loss" not in key and not key.startswith(_COUNTS)}


def _plain(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v, folder) for k, v in value.items() if not _CHANGING.search(str(k))}
    if isinstance(value, (list, tuple)):
        return [_plain(v, folder) for v in value]
    if isinstance(value, torch.Tensor):
        return compute_tensor_digest(value)  # a hundred contents are kept
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).hexdigest(), str(value.dtype), value.shape
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value
