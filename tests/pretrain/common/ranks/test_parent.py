"""Ranks on this machine: their environment and output, a request to stop, and the end of those that wait for one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped, StopRequest
from pretrain.common.ranks.parent import name_log_folder, run_ranks

ROOT = Path(__file__).parents[4]
ENTRIES = "tests.pretrain.common.ranks.entries"
# A command that runs an entry of two ranks in a folder.
COMMAND = """
import sys

from pretrain.common.command_line import run_command_line
from pretrain.common.interrupt import StopRequest
from pretrain.common.ranks.parent import name_log_folder, run_ranks

entry, folder = sys.argv[1:]

def main(_):
    stop = StopRequest()
    with stop.handle_signals():
        run_ranks(entry, [folder], 2, folder, name_log_folder(folder), stop)

run_command_line(main)
"""


@pytest.fixture(autouse=True)
def _entries_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(folder: Path, entry: str, *words: str, stop: StopRequest | None = None) -> Path:
    """Run two ranks; return their log folder."""
    logs = name_log_folder(folder)
    run_ranks(f"{ENTRIES}:{entry}", [str(folder), *words], 2, folder, logs, stop or StopRequest(), grace_s=0.5)
    return logs


def test_every_rank_has_its_environment_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # an allocation that this process is part of
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    logs = run(tmp_path, "work")
    places = [json.loads((tmp_path / f"rank.{rank}").read_text()) for rank in range(2)]
    common: dict[str, str | None] = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "3",
    }
    common["SLURM_JOB_ID"] = None
    assert places == [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in "01"]
    assert capfd.readouterr().out == f"rank 0 of {logs.name}\n"
    assert (logs / "1.out").read_text() == f"rank 1 of {logs.name}\n"


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("bug", RuntimeError, "rank 1 on .* failed: RuntimeError: a bug\n(.*\n)*Traceback"),
        ("hangs", RuntimeError, "rank 1 on .* failed: RuntimeError: a bug"),
        ("killed", RuntimeError, r"rank 1: it was killed by SIGKILL \(out of memory\?\)"),
        ("mistake", UserError, "the value is 3; it must be 2$"),
        ("full", RuntimeError, "rank 1: it ended with status 2"),
    ],
)
def test_the_first_failure_is_raised_and_the_other_ranks_end(
    tmp_path: Path, how: str, error: type[Exception], text: str
) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=text):
        run(tmp_path, "fail", how)
    assert time.monotonic() - start < 60


def test_a_request_to_stop_reaches_every_rank(tmp_path: Path) -> None:
    def request() -> None:
        while len(list(tmp_path.glob("rank.*"))) < 2:
            time.sleep(0.02)
        stop.make("SIGTERM")

    stop = StopRequest()
    threading.Thread(target=request, daemon=True).start()
    with pytest.raises(Stopped, match=r"^SIGTERM$") as caught:
        run(tmp_path, "wait_for_stop", stop=stop)
    assert caught.value.remedy == "add --resume"
    assert os.listdir(tmp_path / "launch")


def test_a_signal_to_all_processes_ends_in_one_line(tmp_path: Path) -> None:
    """Sent to the whole process group during the ranks' imports, the signal takes effect once they can be stopped."""
    command = [sys.executable, "-c", COMMAND, f"{ENTRIES}:wait_for_stop", str(tmp_path)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True)
    ranks = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    deadline = time.monotonic() + 60
    while len(ranks.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGTERM)
    _, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (130, "stopped by SIGTERM; add --resume\n")
