"""A process with a CUDA device, or with the simulated one, and images to train on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import simulated_device
from tests.gpu.runs import DEVICE, prepare
from tests.pretrain.images import write_folder


@pytest.fixture(scope="module")
def on_device() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls another one in a process with the device."""
    if DEVICE == "cuda":
        yield lambda function, *args: function(*args)
        return
    with simulated_device.start_process(prepare) as call:
        yield call


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    count = 33  # an odd number, so that two ranks have unequal shares in a probe
    names = [f"{split}/class{i % 2}/{i:02d}.png" for split in ("train", "val") for i in range(count)]
    return write_folder(tmp_path_factory.mktemp("images"), names, height=48, width=48)
