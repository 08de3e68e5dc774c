"""One pretraining, to compare with: no test writes into its folder."""

from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import write_images
from tests.pretrain.runs import STEPS_PER_EPOCH, run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on `images` without interruption, with kNN after each epoch, once for all modules; return the folder."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        tiny.use(patch)
        results = run(write_images(folder / "images"), folder / "run", "PROBE.KNN_PERIOD", "1")
    assert results["steps"] == 2 * STEPS_PER_EPOCH
    return folder / "run"
