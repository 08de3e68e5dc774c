"""MODEL.WEIGHTS may be a URL."""

import shutil
import socket
from pathlib import Path

import pytest

from pretrain.common.files import sha256
from tests.errors import refused
from tests.pretrain.ranks import call_on_ranks
from tests.transfer import tiny_coco
from transfer import api, train
from transfer.config import default_config
from transfer.weights import locate
from transfer.weights.load import check_same_weights, read_weights
from transfer.weights.locate import find_weights

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
    named = ("b.pth", "a.pth", sha256(backbone)[:8], "--resume reads its checkpoint")
    refused(lambda: check_same_weights(f"{ROOT}/b.pth", began, "out"), *named)
    shutil.copy(backbone, folder / "copy.pth")
    check_same_weights(f"{ROOT}/copy.pth", began, "out")


def test_a_failed_download_is_tried_by_one_rank(tmp_path: Path) -> None:
    call_on_ranks(_fail_to_download, 2, tmp_path)
    assert (tmp_path / "asked").read_text() == "1"


def _fail_to_download(folder: Path) -> None:
    def download(*_: object, **__: object) -> None:
        with open(folder / "asked", "a") as file:
            file.write("1")
        raise TimeoutError("timed out")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FVCORE_CACHE", str(folder / "cache"))
        patch.setattr("iopath.common.file_io.download", download)
        cfg = default_config()
        cfg.MODEL.WEIGHTS = f"{ROOT}/a.pth"
        run = api.Run(cfg, "torchvision", eval_only=True)
        refused(lambda: train._read_weights(run, None, {}), "a.pth: timed out; try again")


def test_a_silent_server_is_not_awaited_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.pth"
        refused(lambda: locate.download(address, silence_s=0.2), address, "timed out")
    assert socket.getdefaulttimeout() is None


@pytest.mark.detectron2
def test_detectron2s_addresses(site: tuple[Path, list[str]], backbone: Path) -> None:
    from detectron2.utils.file_io import PathManager

    shutil.copy(backbone, site[0] / "a.pth")
    ours = find_weights("detectron2://a.pth")
    assert PathManager.get_local_path("detectron2://a.pth") == ours and site[1] == [f"{locate.DETECTRON2}a.pth"]


def test_what_cannot_be_downloaded_or_read_is_named(site: tuple[Path, list[str]], tmp_path: Path) -> None:
    for address in (f"{ROOT}/lost.pth", "s3://bucket/a.pth"):
        refused(lambda address=address: find_weights(address), address)
    (site[0] / "page.pth").write_text("<html>log in first</html>")
    refused(lambda: read_weights(f"{ROOT}/page.pth"), ROOT, tmp_path / "cache", "log in first", "delete that file")
