"""Rates come from a clock that the test moves."""

import logging
import time

import pytest

from pretrain.progress import Progress


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def slow_batches(clock, count):
    for number in range(count):
        clock[0] += 0.25
        yield number


def test_what_happens_in_a_pause_counts_in_no_rate(clock):
    progress = Progress(10, 0, 8, logging.getLogger("test"), False, "test")
    for _ in progress.timed(slow_batches(clock, 4)):
        clock[0] += 0.75
        progress.advance()
    with progress.paused():  # a checkpoint or kNN
        clock[0] += 1000.0
    rates = progress.rates()
    assert rates["images_per_second"] == pytest.approx(8.0)
    assert rates["eta_seconds"] == pytest.approx(6.0)
    assert rates["data_wait_share"] == pytest.approx(0.25)


def test_the_rank_that_waits_longest_gives_the_verdict(clock):
    progress = Progress(10, 0, 8, logging.getLogger("test"), False, "test")
    for _ in progress.timed(slow_batches(clock, 1)):
        clock[0] += 1.75
        progress.advance()
    assert progress.seconds_waited == 0.25
    assert progress.rates(1.5)["data_wait_share"] == pytest.approx(0.75)
    assert progress.seconds_waited == 0.0
