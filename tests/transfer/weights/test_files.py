"""MODEL.WEIGHTS may be an address."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.common.files import sha256
from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.weights import files
from transfer.weights.files import find_weights
from transfer.weights.load import check_same_weights, read_weights

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
ROOT = "https://example.org/models"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Replace the server at ROOT by a folder; return it, and the list of addresses that iopath downloads."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "site"
    asked = []
    folder.mkdir()

    def download(address: str, to: str, *, filename: str) -> str:
        asked.append(address)
        Path(to).mkdir(parents=True, exist_ok=True)
        return shutil.copy(folder / filename, f"{to}/{filename}")

    monkeypatch.setattr("iopath.common.file_io.download", download)
    return folder, asked


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_coco.write_backbone(tmp_path_factory.mktemp("backbone"))


def test_a_file_is_downloaded_once_and_recorded(site: tuple[Path, list[str]], backbone: Path) -> None:
    folder, asked = site
    shutil.copy(backbone, folder / "a.pth")
    began = read_weights(f"{ROOT}/a.pth").summary()
    assert began == {**read_weights(backbone).summary(), "path": f"{ROOT}/a.pth"}
    assert Path(find_weights(f"{ROOT}/a.pth")).read_bytes() == backbone.read_bytes() and len(asked) == 1
    check_same_weights(f"{ROOT}/a.pth", began, "out")
    (folder / "b.pth").write_text("other")
    refused(lambda: check_same_weights(f"{ROOT}/b.pth", began, "out"), "b.pth", "a.pth", sha256(backbone)[:8])
    shutil.copy(backbone, folder / "copy.pth")
    check_same_weights(f"{ROOT}/copy.pth", began, "out")


@pytest.mark.detectron2
def test_detectron2s_addresses(site: tuple[Path, list[str]], backbone: Path) -> None:
    from detectron2.utils.file_io import PathManager

    shutil.copy(backbone, site[0] / "a.pth")
    ours = find_weights("detectron2://a.pth")
    assert PathManager.get_local_path("detectron2://a.pth") == ours and site[1] == [f"{files.DETECTRON2}a.pth"]


def test_what_cannot_be_downloaded_or_read_is_named(site: tuple[Path, list[str]], tmp_path: Path) -> None:
    for address in (f"{ROOT}/lost.pth", "s3://bucket/a.pth"):
        refused(lambda address=address: find_weights(address), address)
    (site[0] / "page.pth").write_text("<html>log in first</html>")
    refused(lambda: read_weights(f"{ROOT}/page.pth"), ROOT, tmp_path / "cache", "log in first", "delete that file")
