"""Looks at this machine: versions, GPUs, engines, SLURM, data sets, disk and shared memory; each with its remedy."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from pretrain.common.run_folder import usable_cores

from .spec import ROOT

State = Literal["ok", "note", "bad"]
_LEAST_FREE = 20 * 2**30  # bytes: the checkpoints of a pretraining and a detector, R50
_LEAST_SHARED = 2**30
_TIMEOUT_S = 15


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        state: ok; note: something optional is missing; bad: something will fail.
        remedy: what to do; empty where all is well.
    """

    subject: str
    state: State
    text: str
    remedy: str = ""


def examine(output: Path, data_root: Path) -> list[Finding]:
    """Every finding.

    Args:
        output: folder below which runs will be written.
        data_root: DATA.ROOT, the folder of the named data sets.
    """
    checks: list[Callable[[], Iterable[Finding]]] = [
        _python, _packages, _gpus, _detectron2, _slurm, lambda: _data(data_root), lambda: _disk(output), _shared_memory,
    ]  # fmt: skip
    return [finding for check in checks for finding in check()]


def run(output: str, data_root: str) -> int:
    """Prints the findings; returns 1 if one of them is bad."""
    findings = examine(Path(output), Path(data_root))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        print(f"{finding.state:<4}  {finding.subject:<{width}}  {finding.text}{remedy}")
    return int(any(finding.state == "bad" for finding in findings))


def _python() -> Iterable[Finding]:
    cores = usable_cores()
    yield Finding("python", "ok", f"{sys.version.split()[0]} in {sys.prefix}; {cores} CPU cores may be used")


def _packages() -> Iterable[Finding]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    unfit = []
    for requirement in map(Requirement, project["dependencies"]):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unfit.append(f"{requirement} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unfit.append(f"{requirement.name} {version} is not {requirement.specifier}")
    count = len(project["dependencies"])
    if unfit:
        yield Finding("packages", "bad", "; ".join(unfit), f"run: {sys.executable} -m pip install -e {ROOT}")
    else:
        yield Finding("packages", "ok", f"all {count} are installed in versions that fit")


def _gpus() -> Iterable[Finding]:
    import torch

    drivers = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    if not torch.cuda.is_available():
        if drivers:
            found = f"nvidia-smi shows {len(drivers.splitlines())}, but torch {torch.__version__} can use none"
            yield Finding("GPUs", "bad", found, "install the torch build for your driver (pytorch.org)")
        else:
            yield Finding("GPUs", "note", "none: everything runs on the CPU, at a size for trying things out")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            yield Finding(f"GPU {index}", "bad", f"{text}: {str(error).splitlines()[0]}", "see nvidia-smi")
        else:
            yield Finding(f"GPU {index}", "ok", f"{text}; torch {torch.__version__} computes on it")


def _detectron2() -> Iterable[Finding]:
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*deprecated", category=FutureWarning)
    try:
        version = importlib.metadata.version("detectron2")
        import detectron2.modeling  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except importlib.metadata.PackageNotFoundError:
        text = "not installed: fine-tuning uses the torchvision engine"
        yield Finding("Detectron2", "note", text, "run: make detectron2")
    except Exception as error:  # whatever its import raises, the other checks go on
        yield Finding(
            "Detectron2", "bad", f"cannot be imported: {' '.join(str(error).split())}", "run: make detectron2"
        )
    else:
        yield Finding("Detectron2", "ok", version)


def _slurm() -> Iterable[Finding]:
    if shutil.which("sbatch") is None:
        yield Finding("SLURM", "note", "no sbatch: jobs run on this machine")
        return
    answer = _output(["sinfo", "--noheader", "--format=%P %a %D"])
    if answer:
        partitions = [line.split()[0] for line in answer.splitlines()]
        yield Finding("SLURM", "ok", f"partitions {', '.join(dict.fromkeys(partitions))}")
    else:
        what = "sbatch is installed, but sinfo finds no cluster: jobs run on this machine"
        yield Finding("SLURM", "note", what, "where there should be one, ask your site")


def _data(root: Path) -> Iterable[Finding]:
    from pretrain.data import datasets

    names = [name for name, folders in {**datasets.FOLDERS, "coco": ["coco"]}.items() if (root / folders[0]).is_dir()]
    if names:
        yield Finding("data", "ok", f"{', '.join(names)} in {root}; a run checks its own before it starts")
    else:
        yield Finding("data", "note", f"no named data set in {root}", "set DATA.ROOT, or use DATA.TRAIN folder:/path")


def _disk(output: Path) -> Iterable[Finding]:
    place = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        yield Finding("disk", "bad", f"{place} is not a folder that you can write to", "choose another OUTPUT_DIR")
        return
    free = shutil.disk_usage(place).free
    text = f"{place}: {free / 2**30:.0f} GiB free"
    if free < _LEAST_FREE:
        wanted = f"the checkpoints of a ResNet-50 and its detector need {_LEAST_FREE / 2**30:.0f} GiB"
        yield Finding("disk", "note", f"{text}; {wanted}", "free space, or choose another OUTPUT_DIR")
    else:
        yield Finding("disk", "ok", text)


def _shared_memory() -> Iterable[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < _LEAST_SHARED:
        remedy = "start the container with --shm-size 8g, or set DATALOADER.NUM_WORKERS 0"
        yield Finding("shared memory", "bad", f"{text}; loader workers pass batches through it", remedy)
    else:
        yield Finding("shared memory", "ok", text)


def _output(command: list[str]) -> str:
    """What a program prints; empty if it is not installed, fails or does not answer in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
