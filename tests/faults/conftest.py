"""One process that has imported everything, from which the commands of all tests here are forked."""

import shutil
from collections.abc import Iterator

import pytest

from tests.faults.commands import Commands


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Skips where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) for the library that injects faults")
    running = Commands(tmp_path_factory.mktemp("faults"))
    yield running
    running.close()
