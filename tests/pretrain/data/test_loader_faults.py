"""A run reports a worker or an image that fails; the same command then resumes it, with equal results."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.common import images
from pretrain.common.errors import UserError
from tests.pretrain.runs import assert_same_end, overrides, run

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

READ = images.read_file


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(images, folder)
    return folder


DEATHS = {
    "a worker process .* has ended .*if memory ran out, lower DATALOADER.NUM_WORKERS": (
        lambda: os.kill(os.getpid(), signal.SIGKILL)
    ),
    r"a worker process .* has ended .*/dev/shm is too small.* \(docker run --shm-size 16g or --ipc=host\)": (
        lambda: os.kill(os.getpid(), signal.SIGBUS)
    ),
    "memory ran out: .*lower DATALOADER.NUM_WORKERS": lambda: bytearray(1 << 62),
}


@pytest.mark.parametrize("message", DEATHS, ids=["killed", "/dev/shm", "memory"])
def test_a_worker_that_dies_ends_the_run_in_one_line(
    images: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
):
    with monkeypatch.context() as changed, pytest.raises(UserError, match=message):
        _during_the_second_epoch(changed, tmp_path / "reads", DEATHS[message])
        run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    assert_same_end(tmp_path / "run", undisturbed)


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


@pytest.mark.parametrize(("fault", "workers"), [("truncated", "2"), ("deleted", "0")])
def test_an_image_that_goes_bad_during_the_run_is_named(
    images: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, workers: str
):
    data = tmp_path / "images"
    shutil.copytree(images, data)
    bad = data / "train/class1/011.png"
    content = bad.read_bytes()

    def damage() -> None:
        bad.unlink()
        if fault == "truncated":
            bad.write_bytes(content[: len(content) // 2])

    with monkeypatch.context() as changed:
        _during_the_second_epoch(changed, tmp_path / "reads", damage)
        with pytest.raises(UserError, match=r"cannot (read|decode) image .*class1/011\.png") as raised:
            run(data, tmp_path / "run", "DATALOADER.NUM_WORKERS", workers)
    assert "\n" not in str(raised.value)
    bad.write_bytes(content)
    run(data, tmp_path / "run", "DATALOADER.NUM_WORKERS", workers)
    assert_same_end(tmp_path / "run", undisturbed)


def _during_the_second_epoch(changed: pytest.MonkeyPatch, reads: Path, change: Callable[[], object]) -> None:
    """Call ``change`` before the 50th image is read; the file ``reads`` counts the images of all workers."""

    def read(path: str, *more: bool) -> bytes:
        with open(reads, "ab") as file:
            file.write(b".")
        if reads.stat().st_size == 50:
            change()
        return READ(path, *more)

    changed.setattr(images, "read_file", read)
