"""A run reports a worker or an image that fails; the same command then resumes it, with equal results."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pretrain.common import images
from tests.errors import refused
from tests.pretrain.runs import assert_same_end, overrides, run

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

READ = images.read_file


DEATHS = {  # what a worker does, and what the error says
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), ("a worker process", "if memory ran out, lower ")),
    "/dev/shm": (lambda: os.kill(os.getpid(), signal.SIGBUS), ("a worker process", "--shm-size 16g or --ipc=host")),
    "memory": (lambda: bytearray(1 << 62), ("memory ran out: ", "lower DATALOADER.NUM_WORKERS")),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_ends_the_run_in_one_line(images: Path, whole: Path, tmp_path: Path, death: str):
    die, says = DEATHS[death]
    with pytest.MonkeyPatch.context() as changed:
        _during_the_second_epoch(changed, tmp_path / "reads", die)
        refused(lambda: run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2"), *says)
    run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    assert_same_end(tmp_path / "run", whole)


def test_a_thread_that_pins_batches_changes_nothing(images: Path, whole: Path, tmp_path: Path, monkeypatch):
    """On a GPU, torch copies the workers' batches in another thread; the memory is ordinary here."""
    pinned: list[tuple[int, ...]] = []
    construct = DataLoader.__init__

    def construct_pinning(self: DataLoader, *args: Any, **options: Any) -> None:
        construct(self, *args, **options | {"pin_memory": True})

    def pin(x: torch.Tensor, device: Any = None) -> torch.Tensor:
        pinned.append(tuple(x.shape))
        return x.clone()

    monkeypatch.setattr(DataLoader, "__init__", construct_pinning)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    with pytest.MonkeyPatch.context() as changed:
        _during_the_second_epoch(changed, tmp_path / "reads", DEATHS["killed"][0])
        refused(lambda: run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2"), *DEATHS["killed"][1])
    run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    assert_same_end(tmp_path / "run", whole)
    assert len({shape for shape in pinned if len(shape) == 5}) == 1  # views


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small /dev/shm needs root")
def test_shared_memory_that_is_too_small_is_one_line_at_once(images: Path, tmp_path: Path):
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    words = overrides(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2", "VIEWS.IMAGE_SIZE", "128")
    command = [*small, sys.executable, "-m", "pretrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "permission denied" in done.stderr:
        pytest.skip(done.stderr)
    assert "Traceback" not in done.stderr and done.returncode == 2
    assert "error: " in done.stderr and "/dev/shm is too small" in done.stderr


@pytest.mark.parametrize(("fault", "workers"), [("decode", "2"), ("read", "0")])
def test_an_image_that_goes_bad_during_the_run_is_named(images, whole, tmp_path, fault, workers):
    """It is truncated or deleted."""
    data = shutil.copytree(images, tmp_path / "images")
    bad = data / "train/class1/011.png"
    content = bad.read_bytes()
    with pytest.MonkeyPatch.context() as changed:
        damage = bad.unlink if fault == "read" else lambda: bad.write_bytes(content[: len(content) // 2])
        _during_the_second_epoch(changed, tmp_path / "reads", damage)
        refused(lambda: run(data, tmp_path / "run", "DATALOADER.NUM_WORKERS", workers), f"cannot {fault} image {bad}")
    bad.write_bytes(content)
    run(data, tmp_path / "run", "DATALOADER.NUM_WORKERS", workers)
    assert_same_end(tmp_path / "run", whole)


def _during_the_second_epoch(changed: pytest.MonkeyPatch, reads: Path, change: Callable[[], object]) -> None:
    """Call ``change`` before the 50th image is read; the file ``reads`` counts the images of all workers."""

    def read(path: str, *more: bool) -> bytes:
        with open(reads, "ab") as file:
            file.write(b".")
        if reads.stat().st_size == 50:
            change()
        return READ(path, *more)

    changed.setattr(images, "read_file", read)
