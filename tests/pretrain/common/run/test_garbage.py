"""Ranks collect garbage at the same steps, and Python does so at all other times."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretrain import train
from pretrain.common import distributed
from pretrain.common.distributed import gather_objects
from pretrain.common.errors import UserError
from pretrain.common.run import garbage
from pretrain.common.run.garbage import GarbageCollector
from tests.errors import refused
from tests.pretrain.ranks import call_on_ranks
from tests.pretrain.runs import run

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


class Cycle:
    """An object that refers to itself, so that only the garbage collector frees its tensor."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(8)
        self.itself = self


@contextmanager
def record_collections() -> Iterator[list[int]]:
    """Yield the generations that are collected in the block."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


def allocate() -> None:
    """Allocate enough objects that Python would collect."""
    lists = [[] for _ in range(10 * gc.get_threshold()[0])]
    lists.clear()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(garbage, "PERIOD", 4)
    yield
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_cycles_live_until_a_collection_that_all_ranks_make(two_ranks: None) -> None:
    tensors: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    with record_collections() as generations, GarbageCollector() as collector:
        for _ in range(9):
            tensors.append(weakref.ref(Cycle().tensor))
            if gc.isenabled():
                generations.clear()  # the first step's are Python's
            else:
                allocate()
            collector.count_step()
            alive.append(sum(tensor() is not None for tensor in tensors))
    assert alive == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert generations[:3] == [2, 2, 2]  # after steps 1, 4 and 8


def test_python_collects_in_an_evaluation_and_what_that_leaves_is_not_looked_at_again(two_ranks: None) -> None:
    with GarbageCollector() as collector:
        collector.count_step()
        with collector.automatic():
            with record_collections() as generations:
                lists = [[] for _ in range(10 * gc.get_threshold()[0])]
            assert generations
        assert not gc.isenabled() and not any(item is lists for item in gc.get_objects())
        refused(lambda: fail_in(collector), "an evaluation fails")
        assert gc.isenabled()


def test_a_cycle_that_was_excluded_is_collected_after_the_next_evaluation(two_ranks: None) -> None:
    cycle = Cycle()
    tensor = weakref.ref(cycle.tensor)
    with GarbageCollector() as collector:
        collector.count_step()
        del cycle
        gc.collect()
        assert tensor() is not None
        with collector.automatic():
            pass
        assert tensor() is None


def fail_in(collector: GarbageCollector) -> None:
    with collector.automatic():
        raise UserError("an evaluation fails")


def test_one_process_and_a_caller_who_collects_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> list[bool]:
        states = []
        with GarbageCollector() as collector:
            collector.count_step()
            states.append(gc.isenabled())
            with collector.automatic():
                states.append(gc.isenabled())
            states.append(gc.isenabled())
        assert gc.get_freeze_count() == 0
        return [*states, gc.isenabled()]

    assert record() == [True] * 4
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    gc.disable()
    try:
        assert record() == [False] * 4
    finally:
        gc.enable()


def _pretrain(images: Path, folder: Path) -> None:
    """Pretrain for eight steps, with a kNN after the sixth; note when Python may collect by itself."""
    states: dict[str, list[bool]] = {"step": [], "probe": []}
    step = train.training_step
    probe = train._probe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_step", lambda *args: states["step"].append(gc.isenabled()) or step(*args))
        patch.setattr(train, "_probe", lambda *args: states["probe"].append(gc.isenabled()) or probe(*args))
        run(images, folder, "SOLVER.MAX_STEPS", "8", "PROBE.KNN_PERIOD", "1")
    assert states == {"step": [True, *[False] * 7], "probe": [True, True]}
    assert gc.isenabled() and gather_objects(gc.get_freeze_count()) == [0, 0]


def test_ranks_of_a_pretraining_collect_between_steps_only(images: Path, tmp_path: Path) -> None:
    call_on_ranks(_pretrain, 2, images, tmp_path / "run")
