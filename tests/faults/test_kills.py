"""Every stage is killed at file system calls all over its run; the next start ends as an uninterrupted run does."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands, Fault
from tests.faults.stages import STAGES, content, left_over
from tests.pretrain import runs
from tests.transfer import tiny_coco

_KILLS = {  # in the ordinary suite, in the slow one
    "pretrain": (2, 14), "knn": (0, 4), "linear": (0, 8), "embedding": (0, 4), "distributions": (0, 4),
    "convert": (1, 6), "data": (0, 6), "torchvision": (2, 12), "detectron2": (0, 12), "report": (0, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of every stage: images, a complete pretraining, and a COCO data set."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "images").symlink_to(images)
    (folder / "empty.yaml").write_text("METHOD: {NAME: jcl}\n")
    runs.run(folder / "images", folder / "run", "SOLVER.EPOCHS", "1", "MODEL.STEM", "imagenet")
    tiny_coco.write(folder / "coco")
    return folder


@pytest.fixture(scope="module")
def whole(commands: Commands, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a stage: how many calls change something in an uninterrupted run, and what its folder then holds."""
    known: dict[str, tuple[int, dict[str, Any]]] = {}

    def of(name: str) -> tuple[int, dict[str, Any]]:
        if name not in known:
            work = tmp_path_factory.mktemp(name)
            ended = commands.run(
                STAGES[name].module, *STAGES[name].arguments(work, data), under=work, fault=Fault("count")
            )
            assert ended.status == 0, ended.text
            assert not left_over(work)
            known[name] = ended.calls, content(work)
            shutil.rmtree(work)
        return known[name]

    return of


@pytest.mark.parametrize(
    ("name", "number", "of"),
    [
        pytest.param(name, number, count, id=f"{name}-{number}-of-{count}", marks=[pytest.mark.slow] * (count == slow)
                     + [pytest.mark.detectron2] * (name == "detectron2"))
        for name, (ordinary, slow) in _KILLS.items()
        for count in (ordinary, slow)
        for number in range(count)
    ],
)  # fmt: skip
def test_a_killed_stage_goes_on(
    commands: Commands, data: Path, whole: Any, tmp_path: Path, name: str, number: int, of: int
) -> None:
    calls, expected = whole(name)
    shared_memory = set(os.listdir("/dev/shm"))
    draw = random.Random(f"{name} {number} {of}")
    stage, at = STAGES[name], int(calls * (number + draw.random()) / of) + 1
    ended = commands.run(
        stage.module, *stage.arguments(tmp_path, data), under=tmp_path, fault=Fault("signal", at, value=signal.SIGKILL)
    )
    assert ended.status == -signal.SIGKILL, f"killed at call {at} of {calls}: {ended.text}"
    ended = commands.run(stage.module, *stage.arguments(tmp_path, data), under=tmp_path)
    assert ended.status == 0, f"killed at call {at} of {calls}, then: {ended.text}"
    assert not left_over(tmp_path), f"killed at call {at} of {calls}"
    again = content(tmp_path)
    assert again.keys() == expected.keys()
    assert [key for key in expected if again[key] != expected[key]] == [], f"killed at call {at} of {calls}"
    assert set(os.listdir("/dev/shm")) <= shared_memory
