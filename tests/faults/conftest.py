"""One process that has imported everything, from which the commands of all tests here are forked."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands
from tests.faults.injection import Fault
from tests.faults.stages import STAGES, content, left_over
from tests.pretrain import runs
from tests.transfer import tiny_coco


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def data(images: Path, tiny_resnet18: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of every stage: images, a complete pretraining, and a COCO data set."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "images").symlink_to(images)
    (folder / "jcl.yaml").write_text("METHOD: {NAME: jcl}\n")
    runs.run(folder / "images", folder / "run", "SOLVER.EPOCHS", "1", "MODEL.STEM", "imagenet")
    tiny_coco.write(folder / "coco")
    return folder


@pytest.fixture(scope="module")
def whole(commands: Commands, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs a stage without a fault and returns its number of such calls, and its files."""

    @functools.cache
    def of(name: str, call: str = "") -> tuple[int, dict[str, Any]]:
        stage = STAGES[name]
        work = tmp_path_factory.mktemp(name)
        ended = commands.run(stage.module, *stage.arguments(work, data), under=work, fault=Fault(call=call))
        assert ended.status == 0 and not left_over(work), ended.text
        left = content(work)
        shutil.rmtree(work)
        return ended.report.calls, left

    return of
