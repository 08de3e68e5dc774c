"""Two users and one run folder: the second is refused in one line, or goes on where the folder lets both write."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pretrain.runs import assert_same_end, overrides

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root acts as other users"),
]
ROOT = Path(__file__).resolve().parents[2]
ALICE, BOB, GROUP = 65531, 65532, 65000


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which both may write and make folders that both may write."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
    (tmp_path / "jcl.yaml").write_text("METHOD: {NAME: jcl}\n")
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    return folder


def pretrain(user: int, images: Path, shared: Path, umask: int = 0o022) -> subprocess.Popen:
    """Starts the command as ``user``, who may read everything here but writes only what permissions allow."""
    reads = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    words = ["setpriv", f"--reuid={user}", f"--regid={GROUP}", "--clear-groups", *reads, sys.executable]
    words += [str(ROOT / "tools/launch.py"), "pretrain", "--config-file", str(shared.parent / "jcl.yaml")]
    words += ["--cluster", "debug", *overrides(images, shared / "run", "SOLVER.CHECKPOINT_PERIOD", "2")]
    env = {**os.environ, "HOME": str(shared), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=env, umask=umask, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=shared
    )


def ended(process: subprocess.Popen) -> tuple[int, str]:
    text, _ = process.communicate(timeout=120)
    return process.returncode, text.strip().splitlines()[-1]


def wait(process: subprocess.Popen, is_time: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_time():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def killed_after(process: subprocess.Popen, is_time: Callable[[], bool]) -> None:
    wait(process, is_time)
    process.send_signal(signal.SIGKILL)
    process.wait()


def checkpoints(shared: Path) -> list[Path]:
    return sorted((shared / "run").glob("checkpoint_*.pth"))


def test_a_second_user_is_refused_while_the_first_runs(images: Path, shared: Path):
    first = pretrain(ALICE, images, shared, 0o077)
    wait(first, (shared / "run/.owner.1.json").exists)
    first.send_signal(signal.SIGSTOP)  # it is alive, and ends after the second
    status, line = ended(pretrain(BOB, images, shared))
    first.send_signal(signal.SIGCONT)
    assert status == 2 and line.startswith("error: ") and str(shared / "run") in line, line
    assert ended(first)[0] == 0


@pytest.mark.parametrize("is_sticky", [False, True], ids=["755", "1777"])
def test_a_second_user_cannot_go_on_in_a_folder_of_the_first(images: Path, shared: Path, is_sticky: bool):
    killed_after(pretrain(ALICE, images, shared), lambda: bool(checkpoints(shared)))
    if is_sticky:
        (shared / "run").chmod(0o1777)
    before = {path: path.read_bytes() for path in (shared / "run").rglob("*") if path.is_file()}
    status, line = ended(pretrain(BOB, images, shared))
    assert status == 2 and line.startswith(f"error: cannot write {shared / 'run'}"), line
    assert {path: path.read_bytes() for path in before} == before
    assert ended(pretrain(ALICE, images, shared))[0] == 0


def test_a_second_user_goes_on_where_both_may_write(images: Path, shared: Path):
    killed_after(pretrain(ALICE, images, shared, 0o002), lambda: bool(checkpoints(shared)))
    status, line = ended(pretrain(BOB, images, shared, 0o002))
    assert status == 0, line
    (shared / "run").rename(shared / "both")
    assert ended(pretrain(ALICE, images, shared, 0o002))[0] == 0
    assert_same_end(shared / "run", shared / "both")
