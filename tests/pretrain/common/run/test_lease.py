"""A run folder has one owner; others are refused until it has ended or is taken for dead."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pretrain.common.errors import UserError
from pretrain.common.run import lease
from tests.errors import refused

TIMES = lease.LeaseTimes()
_HOLD = """
import sys, time
from pretrain.common.run.lease import claim
with claim(sys.argv[1], "pretraining"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Start another process that owns the folder."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _owner(folder: Path, silent_s: float, **values: Any) -> Path:
    """Write an owner's file as another machine would have left it, last touched so many seconds ago."""
    path = folder / ".owner.1.json"
    record = {"host": "node7", "machine": "x", "pid": 4711, "started": "1", "job": ["", "0"], "purpose": "pretraining"}
    path.write_text(json.dumps({**record, **values}))
    os.utime(path, (time.time() - silent_s, time.time() - silent_s))
    return path


def _refused(folder: Path, *names: object) -> None:
    before = _files(folder)
    refused(lambda: lease.claim(folder, "linear probe").__enter__(), folder, "in use", *names)
    assert _files(folder) == before


def test_a_second_process_learns_who_holds_the_folder(tmp_path: Path, holder: subprocess.Popen) -> None:
    _refused(tmp_path, "pretraining", f"process {holder.pid}")
    assert lease.find_owner(tmp_path)["pid"] == holder.pid


def test_the_folder_of_a_killed_process_is_free_at_once(tmp_path: Path, holder: subprocess.Popen) -> None:
    holder.kill()
    holder.wait()
    (tmp_path / f".checkpoint_00000004.pth.{uuid.uuid4().hex}.tmp.pth").write_text("half a checkpoint")
    (tmp_path / ".draft.txt.tmp").touch()
    assert lease.find_owner(tmp_path) == {}
    with lease.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".draft.txt.tmp", ".owner.2.json"]  # and its temporary file is removed
    assert _files(tmp_path) == [".draft.txt.tmp"]


_HERE = {"machine": lease._identify_machine(), "pid": os.getpid()}
# Seconds since the owner last touched its file, its record, and what the error names.
OWNERS: dict[str, tuple[float, dict[str, Any], tuple[str, ...]]] = {
    "a process id in use again": (0, _HERE, ()),
    "another machine": (TIMES.dead_after_s - 10, {}, ("pretraining", "node7", "process 4711")),
    "another machine, silent for too long": (TIMES.dead_after_s + 5, {}, ()),
    "this attempt of a requeued job": (0, {"job": ["12", "1"]}, ("SLURM job 12",)),
    "its earlier attempt": (0, {"job": ["12", "0"]}, ()),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_live_owner_is_named_and_a_dead_ones_folder_is_free(tmp_path: Path, monkeypatch, owner: str) -> None:
    silent_s, values, names = OWNERS[owner]
    if "job" in values:
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(lease.time, "sleep", lambda _: pytest.fail("waited"))
    _owner(tmp_path, silent_s, **values)
    if names:
        _refused(tmp_path, *names)
    else:
        with lease.claim(tmp_path, "pretraining"):
            assert _files(tmp_path) == [".owner.2.json"]


@pytest.mark.parametrize("content", ["", '{"host": "node7", "pid"'])
def test_the_file_of_an_owner_killed_before_it_had_written_its_name_is_removed(tmp_path: Path, content: str) -> None:
    path = tmp_path / ".owner.1.json"
    path.write_text(content)
    written = time.time() - TIMES.nameless_after_s - 1
    os.utime(path, (written, written))
    with lease.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".owner.2.json"]


def test_a_folder_that_was_removed_while_it_was_held_is_free(tmp_path: Path, holder: subprocess.Popen) -> None:
    shutil.rmtree(tmp_path)
    with lease.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".owner.1.json"] and holder.poll() is None


def test_a_forked_child_does_not_release_the_folder(tmp_path: Path) -> None:
    program = f"""
import os
from pretrain.common.run.lease import claim
with claim({str(tmp_path)!r}, "pretraining"):
    if os.fork() == 0:
        raise SystemExit  # unwinds the stack in the child, too
    os.wait()
    print(os.listdir({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['.owner.1.json']\n" and _files(tmp_path) == []


def test_an_owner_touches_its_file_as_long_as_it_lives(tmp_path: Path) -> None:
    with lease.claim(tmp_path, "pretraining", times=lease.LeaseTimes(touch_period_s=0.02)):
        path = tmp_path / ".owner.1.json"
        os.utime(path, (0, 0))  # so old that another machine would consider its owner dead
        deadline = time.monotonic() + 60
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime > 0


def test_a_job_waits_for_an_owner_that_may_have_died_with_its_node(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    _owner(tmp_path, 0)
    with lease.claim(tmp_path, "pretraining", times=lease.LeaseTimes(dead_after_s=1.0)):
        assert _files(tmp_path) == [".owner.2.json"]
    path = _owner(tmp_path, 0)
    monkeypatch.setattr(lease.time, "sleep", lambda _: os.utime(path))
    _refused(tmp_path, "node7")  # it is alive


def test_exactly_one_of_many_concurrent_processes_gets_the_folder(tmp_path: Path) -> None:
    _owner(tmp_path, 1000)  # all of them see a dead owner
    begin = threading.Barrier(8)
    refusals = threading.Barrier(8)
    end = threading.Event()

    def come(_: int) -> bool:
        begin.wait()
        try:
            with lease.claim(tmp_path, "pretraining"):
                return end.wait(60)
        except UserError:
            refusals.wait(60)  # seven, and this test
            return False

    with ThreadPoolExecutor(8) as pool:
        got = pool.map(come, range(8))
        refusals.wait(60)
        end.set()
        assert sorted(got) == [False] * 7 + [True]
    assert _files(tmp_path) == []


def test_an_unreadable_owner_file_counts_as_a_live_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _owner(tmp_path, 5)
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=OSError(24, "Too many open files")))
    _refused(tmp_path, "another machine")


def test_a_lease_of_one_file_leaves_other_files_of_the_folder_free(tmp_path: Path) -> None:
    another = f".a[1].pth2.{uuid.uuid4().hex}.tmp.pth2"
    for name in (f".a[1].pth.{uuid.uuid4().hex}.tmp.pth", f".a[1].pth.json.{uuid.uuid4().hex}.tmp.json", another):
        (tmp_path / name).touch()
    with lease.claim(tmp_path, "conversion", file="a[1].pth"):
        assert another in _files(tmp_path) and len(_files(tmp_path)) == 2
    (tmp_path / another).unlink()
    with lease.claim(tmp_path, "conversion", file="a[1].pth"), lease.claim(tmp_path, "conversion", file="b.pth"):
        claim = lease.claim(tmp_path, "conversion", file="a[1].pth")
        refused(claim.__enter__, f"{tmp_path}/a[1].pth", "conversion")
        with lease.claim(tmp_path, "pretraining"):
            assert len(_files(tmp_path)) == 3
    assert _files(tmp_path) == []
