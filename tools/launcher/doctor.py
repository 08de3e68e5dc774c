"""Checks of this machine: versions, GPUs, engines, SLURM, data sets, disk and shared memory, each with its remedy."""

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from pretrain.common.errors import first_line
from pretrain.common.gpus import read_output
from pretrain.common.logs import hide_library_warnings
from pretrain.common.ranks.environment import count_usable_cores
from pretrain.data import datasets
from tools import ROOT, packages

_GIB = 2**30
_MIN_FREE_GIB = 20  # the checkpoints of a pretraining run and a detector, R50
_SHARED_GIB = 8  # (2 x 8 workers + 1) batches of 58 MB per GPU, on 8 GPUs: 64 images of 6 views of 224 x 224 pixels
Finding = tuple[str, str, str]  # subject; ok, note (something optional is missing) or bad; text and remedy


def examine(output: Path, data_root: Path) -> int:
    """Print the findings; return 1 if one of them is bad.

    Args:
        output: folder below which runs will be written.
        data_root: DATA.ROOT, the folder of the named data sets.
    """
    findings = list(inspect_machine(output, data_root))
    rows = [(state, subject, text) for subject, state, text in findings]
    print(tabulate(rows, tablefmt="plain", disable_numparse=True))
    return int(any(state == "bad" for _, state, _ in findings))


def inspect_machine(output: Path, data_root: Path) -> Iterator[Finding]:
    """Yield one finding per subject; one per GPU."""
    yield "python", "ok", f"{sys.version.split()[0]} in {sys.prefix}; {count_usable_cores()} usable CPU cores"
    yield _inspect_packages()
    yield from _inspect_gpus()
    yield _inspect_detectron2()
    yield _inspect_slurm()
    yield _inspect_data(data_root)
    yield _inspect_disk(output)
    yield _inspect_shared_memory(Path("/dev/shm"))


def _inspect_packages() -> Finding:
    requirements = packages.read_requirements([])
    unfit = packages.find_unfit(requirements)
    if unfit:
        return "packages", "bad", f"{'; '.join(unfit)}; run: {sys.executable} -m pip install -e {ROOT}"
    return "packages", "ok", f"all {len(requirements)} are installed in the required versions"


def _inspect_gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        drivers = read_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
        if drivers:
            text = f"nvidia-smi shows {len(drivers.splitlines())}, but torch {torch.__version__} can use none"
            yield "GPUs", "bad", f"{text}; install the torch build for your driver (pytorch.org)"
        else:
            yield "GPUs", "note", "none: everything runs on the CPU, which is enough to try things out"
        return  # with a driver that is too old, torch counts GPUs, but cannot describe them
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
        capability = f"{properties.major}.{properties.minor}"
        architectures = [name for name in torch.cuda.get_arch_list() if name.startswith("sm_")]  # AMD's are gfx
        oldest = min(architectures, key=_parse_capability, default="")
        if _parse_capability(oldest) > (properties.major, properties.minor):
            problem = f"compute capability {capability}, but torch {torch.__version__} has kernels from {oldest} on"
            yield f"GPU {index}", "bad", f"{text}: {problem}; install its build for CUDA 12.6 (pytorch.org)"
            continue
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            yield f"GPU {index}", "bad", f"{text}: {first_line(error)}; see nvidia-smi"
        else:
            yield f"GPU {index}", "ok", f"{text}; torch {torch.__version__} computes on it"


def _parse_capability(architecture: str) -> tuple[int, int]:
    """Return the compute capability of an architecture such as ``sm_75`` or ``sm_100a``; (0, 0) of an empty one."""
    return divmod(int(re.sub(r"\D", "", architecture) or "0"), 10)


def _inspect_detectron2() -> Finding:
    hide_library_warnings()
    try:
        version = importlib.metadata.version("detectron2")
        import detectron2.modeling  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except importlib.metadata.PackageNotFoundError:
        return "Detectron2", "note", "not installed: fine-tuning uses the torchvision engine; run: make detectron2"
    except Exception as error:  # whatever its import raises, the other checks continue
        return "Detectron2", "bad", f"cannot be imported: {first_line(error)}; run: make detectron2"
    return "Detectron2", "ok", version


def _inspect_slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return "SLURM", "note", "no sbatch: jobs run on this machine"
    partitions = read_output(["sinfo", "--noheader", "--format=%P"]).split()
    if partitions:
        return "SLURM", "ok", f"partitions {', '.join(dict.fromkeys(partitions))}"
    return "SLURM", "note", "sbatch is installed, but sinfo shows no cluster; start jobs with --cluster local or slurm"


def _inspect_data(root: Path) -> Finding:
    names = [name for name in datasets.NAMES if datasets.is_there(name, root)]
    if (root / "coco").is_dir():
        names.append("coco")
    if names:
        return "data", "ok", f"{', '.join(names)} with DATA.ROOT {root}; a run checks its own data before it starts"
    remedy = "set DATA.ROOT, or use DATA.TRAIN folder:/path; Debian's package dataset-fashion-mnist is a first data set"
    return "data", "note", f"no named data set in {root}; {remedy}"


def _inspect_disk(output: Path) -> Finding:
    folder = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return "disk", "bad", f"{folder} is not a folder that you can write to; choose another OUTPUT_DIR"
    free = shutil.disk_usage(folder).free / _GIB
    text = f"{folder}: {free:.0f} GiB free"
    if free < _MIN_FREE_GIB:
        text += f"; the checkpoints of a ResNet-50 and its detector need {_MIN_FREE_GIB} GiB"
        return "disk", "note", f"{text}: free space, or choose another OUTPUT_DIR"
    return "disk", "ok", text


def _inspect_shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return "shared memory", "ok", f"this system has no {folder}"
    free = shutil.disk_usage(folder).free / _GIB
    text = f"{free:.1f} GiB free in {folder}"
    if free >= _SHARED_GIB:
        return "shared memory", "ok", text
    remedy = "start the container with --shm-size 16g or --ipc=host, or lower DATALOADER.NUM_WORKERS"
    text += f"; loader workers pass batches through it, up to {_SHARED_GIB} GiB for JCL on ImageNet: {remedy}"
    return "shared memory", "bad" if free < 1 else "note", text
