"""A loader worker that hangs is named and ends the run; nothing that a worker does keeps the process from ending."""

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pretrain.common import distributed, interrupt, logs
from pretrain.common.interrupt import Stopped, StopRequest
from pretrain.common.ranks import process_group
from pretrain.common.run import socket_folder
from pretrain.common.run.workers import LoaderPatience, SignalSafeDataLoader
from tests.errors import refused


class Images:
    """Images, of which number ``slow`` takes ``seconds`` to read, and ``end`` is the signal that its worker then gets.

    Attributes:
        reads: how many images all workers have begun to read.
    """

    def __init__(self, slow: int = -1, seconds: float = 0, end: signal.Signals | None = None) -> None:
        self.slow = slow
        self.seconds = seconds
        self.end = end
        self.reads = multiprocessing.get_context("spawn").Value("i", 0)  # which forked workers can use, too

    def __getitem__(self, index: int) -> Any:
        with self.reads.get_lock():
            self.reads.value += 1
        if index == self.slow:
            if self.end:
                os.kill(os.getpid(), self.end)
            time.sleep(self.seconds)
        return torch.full((1000,), index)


def load(images: Images, num_workers: int = 2, batch: int = 2, **options: Any) -> Iterator[Any]:
    """Load eight batches; ``options`` are those of `SignalSafeDataLoader` and the fields of its `LoaderPatience`."""
    batches = [list(range(batch * i, batch * i + batch)) for i in range(8)]
    patience = LoaderPatience(**{name: options.pop(name) for name in [*options] if name.endswith("_s")})
    options = {"describe": lambda item: f"image{item}.png", "collate_fn": torch.stack, "patience": patience, **options}
    return iter(SignalSafeDataLoader(images, batches, num_workers, **options))


def wait_for_reads(images: Images, count: int) -> None:
    """Wait until that many images are being read: on a busy machine, a worker's start takes longer than a time-out."""
    end = time.monotonic() + 60
    while images.reads.value < count:
        assert time.monotonic() < end, f"{images.reads.value} of {count} images"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def processes() -> Iterator[None]:
    """Check that a loader leaves no process, and torch's handler of SIGCHLD nowhere."""
    before = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    assert set(multiprocessing.active_children()) <= before
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.mark.parametrize("end", [None, signal.SIGSTOP])
@pytest.mark.parametrize("slow", [0, 7])
def test_a_worker_that_hangs_ends_the_run(slow: int, end: signal.Signals | None, caplog: pytest.LogCaptureFixture):
    images = Images(slow, 600, end)
    batches = load(images, warn_after_s=2, end_after_s=4)  # more than a busy machine keeps the other worker waiting
    wait_for_reads(images, 5 if slow == 0 else 8)  # of four batches; worker 0 reads none after image 0
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "pretrain"):
        # A stopped worker's earlier batch may be lost, too: its memory is handed over when the batch is received.
        names = ["(stopped)", "image"] if end else [f"image{slow}.png"]
        refused(lambda: list(batches), "loader worker process", *names, "file server", "run again")
    assert len(caplog.records) == 1 and names[-1] in caplog.text and "ends after" in caplog.text
    assert 4 <= time.monotonic() - start < 20


@pytest.mark.parametrize(("num_workers", "expected"), [(2, []), (3, ["3 loader workers share 2 cores"])])
def test_more_workers_than_cores_are_said_once(
    num_workers: int, expected: list[str], monkeypatch, caplog, recwarn: pytest.WarningsRecorder
):
    """torch warns of it for each loader, in lines that name no key."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    log_filter = logs._OnceFilter()
    caplog.handler.addFilter(log_filter)
    with caplog.at_level(logging.INFO, "pretrain"):
        for _ in range(2):
            assert len(list(load(Images(), num_workers))) == 8
    caplog.handler.removeFilter(log_filter)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == expected
    assert not recwarn.list


def test_a_slow_read_costs_its_time_alone(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "pretrain"):
        rows = [batch[:, 0].tolist() for batch in load(Images(6, 1.2), warn_after_s=0.4, end_after_s=60)]
    assert rows == [[2 * i, 2 * i + 1] for i in range(8)]
    assert (
        sum("image6.png" in record.getMessage() for record in caplog.records) == 1
    )  # a busy machine is slow elsewhere


def test_a_large_batch_may_take_longer(caplog: pytest.LogCaptureFixture):
    """A batch of thousands of photographs takes minutes, although its worker does not hang."""
    batches = load(Images(2, 0.5), batch=3000, warn_after_s=0.1, end_after_s=600)
    with caplog.at_level(logging.WARNING, "pretrain"):
        assert len(next(batches)) == 3000
    assert "The run ends after 3000 s" in caplog.text


def test_of_several_ranks_one_without_a_batch_says_so_before_the_others_time_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(process_group, "STEP_TIMEOUT_S", 1.5)
    images = Images(7, 600)
    batches = load(images, patience=LoaderPatience(warn_after_s=0.5, end_after_s=600))
    wait_for_reads(images, 8)
    refused(lambda: list(batches), "image7.png", "run again")


def test_a_slow_read_without_workers_is_reported(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "pretrain"):
        assert len(list(load(Images(6, 0.6), num_workers=0, warn_after_s=0.3))) == 8
    assert caplog.text.count("this process does not deliver image6.png, image7.png") == 1


def test_a_worker_stopped_between_batches_ends_the_run():
    """It has sent batches whose memory it can no longer hand over, which blocks torch itself."""
    images = Images()
    batches = load(images, num_workers=1, warn_after_s=0.5, end_after_s=1.5, prefetch_factor=4)
    wait_for_reads(images, 8)
    next(batches)
    time.sleep(0.5)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGSTOP)
    refused(lambda: list(batches), f"worker process {worker.pid} (stopped)", "image")


@pytest.mark.parametrize("moment", ["while it reads", "after it has sent batches"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_dies_is_reported_by_its_signal(moment: str, number: signal.Signals):
    if moment == "while it reads":
        refused(lambda: list(load(Images(9, 0, number))), "a worker process", f"killed by {number.name}", "/dev/shm")
        return
    batches = load(Images())
    next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, number)
    refused(lambda: list(batches), "a worker process", f"killed by {number.name}", "/dev/shm")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_to_all_processes_of_a_run_ends_no_worker(number: signal.Signals):
    assert len(list(load(Images(9, 0, number)))) == 8


def test_a_worker_that_exits_is_reported_by_its_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", os._exit)
    refused(lambda: list(load(Images(9, 3))), "a worker process", "exited with status 3")


def test_an_error_in_a_worker_is_raised_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "sleep", lambda _: os.stat("/no/such/file"))
    with pytest.raises(FileNotFoundError, match="no/such"):
        list(load(Images(9, 3)))


def test_a_request_to_stop_is_obeyed_while_a_worker_hangs():
    stop = StopRequest()
    batches = load(Images(0, 600), warn_after_s=0.2, stop_s=0.5, stop=stop)
    stop.make("SIGTERM")
    with pytest.raises(Stopped, match="SIGTERM") as caught:
        next(batches)
    assert "image0.png" in caught.value.remedy and "resume" in caught.value.remedy


def test_a_second_ctrl_c_stops_the_wait_immediately():
    batches = load(Images(0, 600, signal.SIGSTOP))
    with StopRequest().handle_signals(), pytest.raises(KeyboardInterrupt):
        for seconds in (0.5, 1.0):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        next(batches)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_loader_may_be_abandoned_while_workers_hang(taken: int):
    batches: Any = load(Images(15, 600, signal.SIGSTOP), exit_s=0.5)
    for _ in range(taken):
        next(batches)
    batches.close()
    del batches


def test_a_worker_whose_parent_was_killed_while_it_started_exits(monkeypatch: pytest.MonkeyPatch):
    """torch's own watch begins after the start, which takes seconds with spawn."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    interrupt._end_with_parent(mock.Mock(is_alive=lambda: False))
    assert exits == [0]


TMPDIRS = {"long": "/".join(["x" * 60] * 3), "not ASCII": "\u00e9" * 40, "relative": "a", "missing": "", "a file": "b"}


@pytest.mark.parametrize("kind", TMPDIRS)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_any_tmpdir_works(kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers send their batches by sockets, whose paths have at most 107 bytes."""
    folder = tmp_path / (TMPDIRS[kind] or "nowhere")
    if kind == "a file":
        folder.write_text("")
    elif kind != "missing":
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", folder.name if kind == "relative" else str(folder))
    monkeypatch.setenv("P2T_START_METHOD", method)
    monkeypatch.setattr(tempfile, "tempdir", None)
    process: Any = multiprocessing.current_process()
    monkeypatch.setitem(process._config, "tempdir", None)
    assert len(list(load(Images()))) == 8
    used = Path(process._config["tempdir"])
    assert used.is_relative_to(folder) == (kind == "relative")


def test_no_folder_for_sockets_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket_folder.socket, "socket", mock.Mock(side_effect=OSError("Operation not supported")))
    refused(lambda: list(load(Images())), tempfile.gettempdir(), "/dev/shm", "Operation not supported", "TMPDIR")
