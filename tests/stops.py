"""Requests to stop that come at a known moment of a run."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from pretrain.common.interrupt import Stopped, StopRequest
from pretrain.common.run.state import RunContext
from pretrain.common.run.workers import SignalSafeDataLoader


class _LateRequest(StopRequest):
    """A request that comes when a stage looks for it the n-th time."""

    def __init__(self, looks: int, reason: str) -> None:
        super().__init__()
        self._looks = looks
        self._late_reason = reason

    def __getattribute__(self, name: str) -> object:
        if name == "reason":
            self._looks -= 1
            if self._looks <= 0:
                return self._late_reason
        return super().__getattribute__(name)


def stop_after(steps: int, reason: str = "SIGTERM") -> RunContext:
    """Return a job that is asked to stop while step ``steps`` (from 1) of a pretraining runs."""
    return RunContext(_LateRequest(steps, reason))


def stop_in_step(patch: pytest.MonkeyPatch, number: int) -> StopRequest:
    """Return a request that comes in step ``number`` (from 1) of a fine-tuning."""
    from transfer import train

    request = StopRequest()
    run_step = train.run_step

    def run_and_request(trainer: Any, model: Any, batches: Any, iteration: int) -> None:
        run_step(trainer, model, batches, iteration)
        if iteration + 1 == number:
            request.make("SIGTERM")

    patch.setattr(train, "run_step", run_and_request)
    return request


def stop_before_batch(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let loaders obey a stop while they wait for batch ``number`` (from 1), as if their worker hung."""
    receive = SignalSafeDataLoader.__iter__

    def iterate(loader: SignalSafeDataLoader) -> Iterator[Any]:
        yield from itertools.islice(receive(loader), number - 1)
        raise Stopped("SIGTERM", "no batch arrives")

    patch.setattr(SignalSafeDataLoader, "__iter__", iterate)
