"""Rates come from a clock that the test moves."""

import logging
import time

import pytest
import torch

from pretrain.common import distributed
from pretrain.common.run.progress import Progress, reduce_metrics, take_memory_peaks
from tests.pretrain.ranks import call_on_ranks


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def slow_batches(clock, count):
    for number in range(count):
        clock[0] += 0.25
        yield number


def test_pauses_do_not_count_in_rates(clock):
    progress = Progress(10, 0, 8, "test")
    for _ in progress.measure_waits(slow_batches(clock, 4)):
        clock[0] += 0.75
        progress.advance()
    with progress.pause():  # a checkpoint or kNN
        clock[0] += 1000.0
    assert progress.seconds_waited == 1.0
    rates = progress.take_rates(3.0)  # of the rank that waited longest
    assert rates["images_per_second"] == pytest.approx(8.0) and rates["eta_seconds"] == pytest.approx(6.0)
    assert rates["data_wait_share"] == pytest.approx(0.75) and progress.seconds_waited == 0.0


def test_slow_steps_are_counted_each_minute_although_their_report_is_far(clock, caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(12, 0, 60, "test")
    for _ in range(7):
        clock[0] += 20.0
        progress.advance()
    assert [line.split(" images/s")[0] for line in caplog.messages] == ["step 3/12  3.0", "step 6/12  3.0"]
    progress.report("loss 4.0000", progress.take_rates(), force=True)
    clock[0] += 59.0
    progress.advance()
    assert len(caplog.messages) == 3 and caplog.messages[-1].startswith("step 7/12  loss 4.0000  3.0 images/s")


def _two_ranks() -> None:
    rank = distributed.rank()
    loss = torch.tensor((1.0, 2.0)[rank])
    with pytest.MonkeyPatch.context() as patch:
        peaks = {"max_memory_mib": (700.5, 300.0)[rank]}
        patch.setattr("pretrain.common.run.progress.take_memory_peaks", lambda device: peaks)
        values, waited, memory = reduce_metrics({"loss": loss, "x": 2 * loss}, (0.5, 2.0)[rank])
    assert values == {"loss": 1.5, "x": 3.0} and waited == 2.0 and memory == {"max_memory_mib": 700.5}


def test_logged_numbers_are_those_of_the_global_batch():
    call_on_ranks(_two_ranks, 2)
    loss = torch.tensor(0.1)
    assert reduce_metrics({"loss": loss}, 0.0) == ({"loss": loss.item()}, 0.0, {})  # to the bit


def test_each_line_has_the_memory_peaks_since_the_previous_one(monkeypatch):
    peak = [3 * 2**20]
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 2**20))
    assert take_memory_peaks(torch.device("cuda:0")) == {"max_memory_mib": 3.0, "max_reserved_mib": 5.0}
    assert take_memory_peaks(torch.device("cuda:0"))["max_memory_mib"] == 1.0
    assert take_memory_peaks(torch.device("cpu")) == {}  # although an earlier run of this process used the GPU
