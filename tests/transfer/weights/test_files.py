"""MODEL.WEIGHTS at an address, from a server on this machine."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretrain.common.files import sha256
from tests.errors import refused
from tests.resnets import resnet_state
from transfer.convert import convert
from transfer.weights import files
from transfer.weights.files import weights_file
from transfer.weights.load import check_same_weights, read_weights


class Handler(http.server.SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:
        if "GET" in str(args[0]):
            self.asked.append(self.path)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and its address. `Handler.asked` has the paths that were asked for."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Handler, "asked", [], raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    torch.save(resnet_state(head=False), folder / "a.tar")
    convert(folder / "a.tar", folder / "a.pth")
    return folder / "a.pth"


def test_a_file_is_downloaded_once_and_recorded(site: tuple[Path, str], backbone: Path) -> None:
    folder, root = site
    shutil.copy(backbone, folder / "a.pth")
    began = read_weights(f"{root}/a.pth").summary()
    assert began == {**read_weights(backbone).summary(), "path": f"{root}/a.pth"}
    assert Path(weights_file(f"{root}/a.pth")).read_bytes() == backbone.read_bytes()
    assert Handler.asked == ["/a.pth"]
    (folder / "a.pth").unlink()
    check_same_weights(f"{root}/a.pth", began, "out")  # a resumed run no longer needs it
    (folder / "b.pth").write_text("other")
    refused(lambda: check_same_weights(f"{root}/b.pth", began, "out"), "b.pth", "a.pth", sha256(backbone)[:8])
    shutil.copy(backbone, folder / "copy.pth")
    check_same_weights(f"{root}/copy.pth", began, "out")


@pytest.mark.detectron2
def test_detectron2s_addresses(site: tuple[Path, str], backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from detectron2.utils import file_io

    folder, root = site
    monkeypatch.setattr(files, "DETECTRON2", f"{root}/")
    monkeypatch.setattr(file_io.Detectron2Handler, "S3_DETECTRON2_PREFIX", f"{root}/")
    shutil.copy(backbone, folder / "a.pth")
    ours = weights_file("detectron2://a.pth")
    assert file_io.PathManager.get_local_path("detectron2://a.pth") == ours and Handler.asked == ["/a.pth"]


def test_what_cannot_be_downloaded_or_read_is_named(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, root = site
    for address in (f"{root}/lost.pth", "http://127.0.0.1:1/a.pth", "s3://bucket/a.pth"):
        refused(lambda address=address: weights_file(address), address)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    (folder / "page.pth").write_text("<html>log in first</html>")
    refused(lambda: read_weights(f"{root}/page.pth"), root, tmp_path / "cache", "log in first", "delete that file")
