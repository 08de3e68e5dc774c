"""Looks at this machine: versions, GPUs, engines, SLURM, data sets, disk and shared memory; each with its remedy."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from pretrain.common.errors import first_line
from pretrain.common.run.folder import usable_cores
from pretrain.data import datasets

from .spec import ROOT

_GIB = 2**30
_LEAST_FREE_GIB = 20  # the checkpoints of a pretraining and a detector, R50
Finding = tuple[str, str, str]  # what was looked at; ok, note (something optional is missing) or bad; text and remedy


def run(output: str, data_root: str) -> int:
    """Prints the findings; returns 1 if one of them is bad.

    Args:
        output: folder below which runs will be written.
        data_root: DATA.ROOT, the folder of the named data sets.
    """
    findings = list(examine(Path(output), Path(data_root)))
    width = max(len(subject) for subject, _, _ in findings)
    for subject, state, text in findings:
        print(f"{state:<4}  {subject:<{width}}  {text}")
    return int(any(state == "bad" for _, state, _ in findings))


def examine(output: Path, data_root: Path) -> Iterator[Finding]:
    yield "python", "ok", f"{sys.version.split()[0]} in {sys.prefix}; {usable_cores()} CPU cores may be used"
    yield _packages()
    yield from _gpus()
    yield _detectron2()
    yield _slurm()
    yield _data(data_root)
    yield _disk(output)
    yield from _shared_memory()


def _packages() -> Finding:
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
    if unfit:
        return "packages", "bad", f"{'; '.join(unfit)}; run: {sys.executable} -m pip install -e {ROOT}"
    return "packages", "ok", f"all {len(project['dependencies'])} are installed in versions that fit"


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        if drivers := _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]):
            text = f"nvidia-smi shows {len(drivers.splitlines())}, but torch {torch.__version__} can use none"
            yield "GPUs", "bad", f"{text}; install the torch build for your driver (pytorch.org)"
        else:
            yield "GPUs", "note", "none: everything runs on the CPU, at a size for trying things out"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            yield f"GPU {index}", "bad", f"{text}: {first_line(error)}; see nvidia-smi"
        else:
            yield f"GPU {index}", "ok", f"{text}; torch {torch.__version__} computes on it"


def _detectron2() -> Finding:
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*deprecated", category=FutureWarning)
    try:
        version = importlib.metadata.version("detectron2")
        import detectron2.modeling  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except importlib.metadata.PackageNotFoundError:
        return "Detectron2", "note", "not installed: fine-tuning uses the torchvision engine; run: make detectron2"
    except Exception as error:  # whatever its import raises, the other checks go on
        return "Detectron2", "bad", f"cannot be imported: {first_line(error)}; run: make detectron2"
    return "Detectron2", "ok", version


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return "SLURM", "note", "no sbatch: jobs run on this machine"
    partitions = _output(["sinfo", "--noheader", "--format=%P"]).split()
    if partitions:
        return "SLURM", "ok", f"partitions {', '.join(dict.fromkeys(partitions))}"
    return "SLURM", "note", "sbatch is installed, but sinfo shows no cluster; add --cluster local or --cluster slurm"


def _data(root: Path) -> Finding:
    names = [name for name, folder in {**datasets.FOLDERS, "coco": "coco"}.items() if (root / folder).is_dir()]
    if names:
        return "data", "ok", f"{', '.join(names)} in {root}; a run checks its own before it starts"
    return "data", "note", f"no named data set in {root}; set DATA.ROOT, or use DATA.TRAIN folder:/path"


def _disk(output: Path) -> Finding:
    place = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return "disk", "bad", f"{place} is not a folder that you can write to; choose another OUTPUT_DIR"
    free = shutil.disk_usage(place).free / _GIB
    if free < _LEAST_FREE_GIB:
        text = f"the checkpoints of a ResNet-50 and its detector need {_LEAST_FREE_GIB} GiB"
        return "disk", "note", f"{place}: {free:.0f} GiB free; {text}: free space, or choose another OUTPUT_DIR"
    return "disk", "ok", f"{place}: {free:.0f} GiB free"


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if folder.is_dir():
        free = shutil.disk_usage(folder).free / _GIB
        text = f"{free:.1f} GiB free in {folder}"
        if free < 1:
            text += "; loader workers pass batches through it: start the container with --shm-size 8g, or set "
            text += "DATALOADER.NUM_WORKERS 0"
        yield "shared memory", "bad" if free < 1 else "ok", text


def _output(command: list[str]) -> str:
    """What a program prints; empty if it is not installed, fails or does not answer in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
