"""The data set of most tests."""

from pathlib import Path

import pytest

from tests.transfer import tiny_coco


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Write six images with boxes and polygons to ``tmp_path``/data; return the data set's name."""
    return tiny_coco.write(tmp_path / "data")
