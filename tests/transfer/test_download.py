"""MODEL.WEIGHTS at an address, from a server on this machine."""

from __future__ import annotations

import http.server
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.common.files import sha256
from tests.resnets import resnet_state
from tests.transfer import tiny_coco
from transfer import download, train_net
from transfer.convert import convert
from transfer.preflight import weights_file
from transfer.weights import check_same_weights, read_weights


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``: path -> the bytes that it sends, and the Content-Length that it announces."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, tuple[bytes, int]] = {}
        self.asked: list[str] = []

    def address(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path not in self.server.files:
            self.send_error(404)
            return
        content, length = self.server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    torch.save(resnet_state(head=False), folder / "a.tar")
    convert(folder / "a.tar", folder / "a.pth")
    return folder / "a.pth"


def offer(server: Server, path: str, file: Path) -> str:
    content = file.read_bytes()
    server.files[path] = (content, len(content))
    return server.address(path)


def test_a_file_is_downloaded_once_and_recorded(server: Server, backbone: Path) -> None:
    address = offer(server, "/zoo/a.pth", backbone)
    weights = read_weights(address)
    assert weights.summary() == {**read_weights(backbone).summary(), "path": address, "provenance": weights.provenance}
    assert weights.sha256 == sha256(backbone) and "MODEL.RESNETS.STRIDE_IN_1X1" in weights.provenance
    assert Path(weights_file(address)).read_bytes() == backbone.read_bytes()
    assert server.asked == ["/zoo/a.pth"]


@pytest.mark.detectron2
def test_detectron2s_addresses(server: Server, backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from detectron2.utils import file_io

    monkeypatch.setattr(download, "DETECTRON2", server.address("/detectron2/"))
    monkeypatch.setattr(file_io.Detectron2Handler, "S3_DETECTRON2_PREFIX", server.address("/detectron2/"))
    offer(server, "/detectron2/zoo/a.pth", backbone)
    ours = weights_file("detectron2://zoo/a.pth")
    assert file_io.PathManager.get_local_path("detectron2://zoo/a.pth") == ours and len(server.asked) == 1


def test_what_cannot_be_downloaded_is_one_line_and_leaves_nothing(
    server: Server, backbone: Path, tmp_path: Path
) -> None:
    lost = server.address("/lost.pth")
    with pytest.raises(UserError, match=r"lost\.pth: HTTP Error 404: Not Found; try again"):
        weights_file(lost)
    content = backbone.read_bytes()
    server.files["/short.pth"] = (content[:1000], len(content))
    short = server.address("/short.pth")
    with pytest.raises(UserError, match=r"short\.pth: .*retrieval incomplete: got only 1000 out of"):
        weights_file(short)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert weights_file(offer(server, "/short.pth", backbone)).endswith("/short.pth")  # nothing of it was kept
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:1/a\.pth: \[Errno 111\] Connection refused; try again"):
        weights_file("http://127.0.0.1:1/a.pth")
    with pytest.raises(UserError, match=r"s3://bucket/a\.pth is neither a file nor a detectron2://"):
        weights_file("s3://bucket/a.pth")


def test_other_content_names_address_and_file(server: Server, tmp_path: Path) -> None:
    page = b"<html>log in first</html>"
    server.files["/page.pth"] = (page, len(page))
    address = server.address("/page.pth")
    with pytest.raises(
        UserError, match=r"page\.pth: .*cache.* it holds text, '<html>log in.* delete that file to down"
    ):
        read_weights(address)
    bare = pickle.dumps({"other_w": np.zeros(3)})
    server.files["/R-50.pkl"] = (bare, len(bare))
    with pytest.raises(
        UserError, match=r"convert it first: python tools/convert_to_d2\.py /.*cache.*/R-50\.pkl weights/"
    ):
        read_weights(server.address("/R-50.pkl"))


def test_a_training_begins_with_it_and_resumes_without_it(server: Server, backbone: Path, tmp_path: Path) -> None:
    address, name = offer(server, "/a.pth", backbone), tiny_coco.write(tmp_path / "data")

    def words(*flags: str, **keys: object) -> list[str]:
        return tiny_coco.command(tmp_path, name, "torchvision", *flags, DATASETS__TEST=(), **keys)

    train_net.main(words(MODEL__WEIGHTS=address, SOLVER__MAX_ITER=1))
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (results["weights"]["path"], results["weights"]["sha256"]) == (address, sha256(backbone))
    server.files.clear()
    train_net.main(words("--resume", MODEL__WEIGHTS=address))
    assert json.loads((tmp_path / "out/results.json").read_text())["weights"] == results["weights"]
    (tmp_path / "other").write_text("other")
    other = offer(server, "/b.pth", tmp_path / "other")
    with pytest.raises(UserError, match=r"MODEL\.WEIGHTS is '.*/b\.pth', but out began with '.*/a\.pth' \(SHA-256"):
        check_same_weights(other, results["weights"], "out")
    copy = offer(server, "/copy/a.pth", backbone)
    check_same_weights(copy, results["weights"], "out")
