"""One owner per run folder: who is refused, and when a dead owner's folder is free again."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pretrain.common import lock
from pretrain.common.errors import UserError

_HOLD = """
import sys, time
from pretrain.common.lock import claim
with claim(sys.argv[1], "pretraining"):
    print("held", flush=True)
    time.sleep(60)
"""


def _holder(folder: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _owner_elsewhere(folder: Path, silent_s: float, **values: str) -> Path:
    """An owner's file as another machine would have left it, last touched so many seconds ago."""
    folder.mkdir(exist_ok=True)
    path = folder / ".owner.1.json"
    record = {
        **lock._identity(),
        "host": "node7",
        "place": "node7 x y",
        "pid": 4711,
        "token": "t",
        "work": "pretraining",
    }
    path.write_text(json.dumps({**record, "since": 1.7e9, **values}))
    now = path.stat().st_mtime
    os.utime(path, (now - silent_s, now - silent_s))
    return path


def test_a_second_process_learns_who_holds_the_folder(tmp_path: Path) -> None:
    process = _holder(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"{tmp_path} is in use: pretraining on .*, process {process.pid}, since"):
            lock.claim(tmp_path, "linear probe").__enter__()
        assert _files(tmp_path) == [".owner.1.json"]  # the refused one leaves nothing behind
    finally:
        process.kill()
        process.wait()


def test_the_folder_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    process = _holder(tmp_path)
    process.kill()
    process.wait()
    (tmp_path / ".checkpoint_00000004.pth.0123.tmp").write_text("half a checkpoint")
    with lock.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".owner.2.json"]  # and what it was writing is gone
    assert _files(tmp_path) == []


def test_an_error_releases_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the run's own"), lock.claim(tmp_path / "run", "pretraining"):
        raise RuntimeError("the run's own")
    assert _files(tmp_path / "run") == []


def test_a_process_id_in_use_again_is_not_the_owner(tmp_path: Path) -> None:
    me = lock._identity()
    (tmp_path / ".owner.1.json").write_text(json.dumps({**me, "started": "1", "token": "t"}))
    with lock.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".owner.2.json"]


def test_another_machines_owner_lives_as_long_as_it_touches_its_file(tmp_path: Path) -> None:
    _owner_elsewhere(tmp_path, silent_s=12)
    with pytest.raises(UserError, match="is in use: pretraining on node7, process 4711, since 2023-"):
        lock.claim(tmp_path, "pretraining").__enter__()
    assert _files(tmp_path) == [".owner.1.json"]


def test_an_owner_touches_its_file_as_long_as_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_TOUCH_PERIOD_S", 0.02)
    with lock.claim(tmp_path, "pretraining"):
        path = tmp_path / ".owner.1.json"
        for _ in range(2):
            os.utime(path, (0, 0))  # silent for so long that another machine would take it for dead
            deadline = time.monotonic() + 60
            while (lock._seconds_since_touch(path) or 0.0) > 60 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert lock._seconds_since_touch(path) < 60


def test_another_machines_silent_owner_is_dead(tmp_path: Path) -> None:
    _owner_elsewhere(tmp_path, silent_s=lock._DEAD_AFTER_S + 5)
    with lock.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".owner.2.json"]


def test_a_requeued_job_takes_over_from_its_earlier_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    path = _owner_elsewhere(tmp_path, silent_s=0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock.claim(tmp_path, "pretraining"):
        assert not path.exists()
    _owner_elsewhere(tmp_path, silent_s=0, job="big/11")
    with pytest.raises(UserError, match="SLURM job 11"):
        lock.claim(tmp_path, "pretraining").__enter__()


def test_of_many_that_come_at_once_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    process = _holder(tmp_path)
    process.kill()
    process.wait()  # all of them find a dead owner
    won, refused, begin, end = [], [], threading.Barrier(8), threading.Event()

    def come() -> None:
        begin.wait()
        try:
            with lock.claim(tmp_path, "pretraining"):
                won.append(1)
                end.wait(60)
        except UserError:
            refused.append(1)
            if len(refused) == 7:
                end.set()

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(won), len(refused)) == (1, 7)
    assert _files(tmp_path) == []


@pytest.mark.parametrize("content", ["", '{"host": "n1", "pla'])
def test_an_owner_killed_before_it_wrote_its_name_is_waited_for_shortly(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_NAMELESS_AFTER_S", 0.5)
    (tmp_path / ".owner.1.json").write_text(content)
    with lock.claim(tmp_path, "pretraining"):
        assert _files(tmp_path) == [".owner.2.json"]


def test_an_owner_without_a_name_on_a_full_disk_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_NAMELESS_AFTER_S", 0.2)
    monkeypatch.setattr(lock, "_seconds_since_touch", lambda path: 0.0)  # what it gives where no file can be made
    (tmp_path / ".owner.1.json").write_text("")
    with pytest.raises(UserError, match="is in use"):
        lock._Owner(tmp_path, "pretraining", "")


def test_an_owner_that_this_user_may_not_read_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def refused(self: Path, *args: Any, **options: Any) -> str:
        if self.parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return read_text(self, *args, **options)

    (tmp_path / ".owner.1.json").write_text("{}")
    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(UserError, match="is in use: a run of another user on another machine"):
        lock._Owner(tmp_path, "pretraining", "")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE, errno.EIO])
def test_a_failing_read_does_not_make_a_live_owner_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    read_text = Path.read_text

    def fails(self: Path, *args: Any, **options: Any) -> str:
        if self.suffix == ".json":
            raise OSError(code, os.strerror(code))
        return read_text(self, *args, **options)

    monkeypatch.setattr(lock, "_TOUCH_PERIOD_S", 0.02)
    monkeypatch.setattr(lock, "_NAMELESS_AFTER_S", 0.0)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("the lock ended a live run"))
    process = _holder(tmp_path)
    try:
        with lock.claim(tmp_path / "other", "pretraining"), monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", fails)
            time.sleep(0.2)  # several touches
            patch.setattr(lock, "_TOUCH_PERIOD_S", 10.0)
            os.utime(tmp_path / ".owner.1.json", (time.time() - 5, time.time() - 5))
            with pytest.raises(UserError, match="is in use: a run"):
                lock.claim(tmp_path, "pretraining").__enter__()
    finally:
        process.kill()
        process.wait()


def test_one_file_of_a_folder(tmp_path: Path) -> None:
    with (
        lock.claim(tmp_path, "conversion", of="a.pth"),
        lock.claim(tmp_path, "conversion", of="b.pth"),
        pytest.raises(UserError, match=rf"{tmp_path}/a\.pth is in use: conversion"),
    ):
        lock.claim(tmp_path, "conversion", of="a.pth").__enter__()
    assert _files(tmp_path) == []


def test_a_name_may_look_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / ".w[1].pth.owner.1.json").write_text(json.dumps({**lock._identity(), "started": "1", "token": "t"}))
    with lock.claim(tmp_path, "conversion", of="w[1].pth"):
        assert _files(tmp_path) == [".w[1].pth.owner.2.json"]


def test_where_no_start_of_a_process_is_known_its_silence_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "start_of", lambda _: "")  # as without /proc
    path = _owner_elsewhere(tmp_path, silent_s=lock._DEAD_AFTER_S + 5, place=lock._identity()["place"], started="")
    with lock.claim(tmp_path, "pretraining"):
        assert not path.exists()


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_where_a_folder_should_be(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file"):
        lock.claim(f"{tmp_path}/file{below}", "pretraining").__enter__()
