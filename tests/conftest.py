"""Settings of all tests: one thread per process, and which tests may be skipped."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported, and for processes the tests start
    os.environ.setdefault(_name, "1")

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tests import tiny  # noqa: E402
from tests.slurm_cluster import slurm_cluster  # noqa: E402, F401  (a fixture for every test folder)

# Reasons for which a test may be skipped where P2T_NO_SKIPS is set, as .ci/run does: any other skip fails the run.
_ALLOWED_SKIPS = ("no CUDA device", "lightly is not installed")
_REFUSED_SKIPS = pytest.StashKey[list[str]]()


def write_images(root: Path) -> Path:
    """Write 48 training and 16 validation images of 20 px in two classes of different colors; return their folder."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for c, color in enumerate(((200, 60, 60), (60, 60, 200))):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(count):
                image = np.clip(rng.normal(color, 25, (20, 20, 3)), 0, 255).astype(np.uint8)
                cv2.imwrite(str(folder / f"{i:03d}.png"), image)
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a module's own copy of `write_images`."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def tiny_resnet18() -> Iterator[None]:
    """Make every ResNet-18 tiny, in modules that say ``pytestmark = pytest.mark.usefixtures("tiny_resnet18")``.

    A single test calls ``tiny.use(monkeypatch)``: what this fixture changes stays until the end of the module.
    """
    with pytest.MonkeyPatch.context() as patch:
        tiny.use(patch)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_of_an_earlier_test() -> None:
    """Remove log files from the loggers, which hide their messages from pytest."""
    for name in ("pretrain", "transfer", "tools", "detectron2", "detectron2.evaluation.evaluator", "fvcore"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()


@pytest.fixture(scope="module", autouse=True)
def _precision_of_a_module_ends_with_it() -> Iterator[None]:
    """Restore torch's switches of TF32, which stages and benchmarks that run in this process set."""
    import torch

    precision = torch.get_float32_matmul_precision()
    is_tf32_allowed = torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = is_tf32_allowed


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("detectron2") is None:
        for item in items:
            if item.get_closest_marker("detectron2"):
                item.add_marker(pytest.mark.skip(reason="Detectron2 is not installed: make detectron2"))


def find_refused_skips(session: pytest.Session) -> list[str]:
    """Return the reasons of skips that `P2T_NO_SKIPS` does not allow."""
    without_detectron2 = os.environ["P2T_NO_SKIPS"] == "but-detectron2"
    allowed = [*_ALLOWED_SKIPS]
    reasons = []
    if without_detectron2:
        allowed.append("Detectron2 is not installed")
    elif importlib.util.find_spec("detectron2") is None:
        reasons.append("Detectron2 is not installed")
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    for report in reporter.stats.get("skipped", []):
        place, line, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", "", str(report.longrepr))
        if not any(text in reason for text in allowed):
            reasons.append(f"{place}:{line}: {reason}")
    return list(dict.fromkeys(reasons))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("P2T_NO_SKIPS") and not hasattr(session.config, "workerinput"):
        session.config.stash[_REFUSED_SKIPS] = find_refused_skips(session)
        if session.config.stash[_REFUSED_SKIPS]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the refused skips last, below the counts, where a reader of the log looks."""
    for reason in config.stash.get(_REFUSED_SKIPS, []):
        print(f"not allowed to be skipped here: {reason}")
