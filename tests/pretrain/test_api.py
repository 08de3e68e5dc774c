"""The Python interface, as in a notebook: one call pretrains, one loads the backbone."""

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pretrain
from pretrain.common import interface, interrupt
from pretrain.common.image_checks.pixels import read_any
from pretrain.common.images import read_image
from pretrain.common.weights.provenance import InputFormat
from pretrain.data.views import make_center_view
from pretrain.keys import IMAGENET_STD as STD
from pretrain.model.encoder import build_backbone
from pretrain.monitor import TrainingMonitor
from tests.errors import refused
from tests.pretrain.runs import assert_same_end, overrides
from transfer import convert, fine_tune, load_detector
from transfer.config import load_config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

RECIPE = Path(__file__).parents[2] / "configs/coco_R50_FPN_1x.yaml"
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)


def keys_of(images: Path, output: Path) -> dict[str, str]:
    words = overrides(images, output)
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_run_and_its_backbone(images: Path, tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    keys = {**keys_of(images, tmp_path), "VIEWS.MEAN": list(np.full(3, 0.5)), "OUTPUT_DIR": tmp_path / "run"}
    results = pretrain.pretrain(overrides=keys)
    assert results["stage"] == "pretrain" and signal.getsignal(signal.SIGINT) is before
    resnet: Any = pretrain.load_backbone(tmp_path / "run")
    assert not resnet.training and resnet(IMAGES).shape == (2, 64)
    file = torch.load(tmp_path / "run/checkpoint_final.pth", weights_only=True)
    assert torch.equal(resnet.conv1.weight, file["state_dict"]["module.encoder_q.conv1.weight"])
    key = pretrain.load_backbone(tmp_path / "run", encoder="key")
    assert not torch.equal(key(IMAGES), resnet(IMAGES))
    files = [str(path) for path in sorted((images / "val" / "class0").iterdir())[:2]]
    prepared = resnet.transform(files)
    pixels = torch.from_numpy(np.stack([make_center_view(read_image(file), 16, 0) for file in files]))
    expected = (pixels.permute(0, 3, 1, 2) / 255 - 0.5) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(prepared, expected, atol=1e-6), "of the run's size and mean"
    assert torch.equal(resnet.transform(read_image(files[0])), prepared[0])


def test_a_backbone_without_a_config_takes_the_default_images(tmp_path: Path):
    torch.save(build_backbone("resnet18", "imagenet").state_dict(), tmp_path / "plain.pth")
    transform: Any = pretrain.load_backbone(tmp_path / "plain.pth").transform
    gray = transform(np.full((300, 400, 3), 124, np.uint8))
    expected = pytest.approx((124 / 255 - 0.485) / 0.229, abs=1e-5)
    assert gray.shape == (3, 224, 224) and gray[0].unique().item() == expected
    refused(lambda: transform(np.zeros((8, 8, 3))), "array", "float64", ".astype(np.uint8)")
    refused(lambda: transform([[1, 2]]), "image 1", "list", "PIL")


def test_an_interrupted_cell_leaves_a_checkpoint(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = {**keys_of(images, tmp_path / "run"), "SOLVER.EPOCHS": 10000}
    step = TrainingMonitor.watch

    def interrupted(self: TrainingMonitor, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingMonitor, "watch", interrupted)
    with pytest.raises(interrupt.Stopped, match="SIGINT") as caught:
        pretrain.pretrain(overrides=keys)
    assert "contains the checkpoint of step" in caught.value.remedy
    assert list((tmp_path / "run").glob("checkpoint_*.pth"))


REFUSED = {
    "a list of pairs": (lambda: pretrain.pretrain("", [("SOLVER.EPOCHS", 1)]), "list", "dictionary"),  # type: ignore
    "words": (lambda: pretrain.pretrain("", "SOLVER.EPOCHS 1"), "str", "dictionary"),  # type: ignore
    "a config for the file": (lambda: pretrain.pretrain({"SOLVER.EPOCHS": 1}), "config_file", "dict"),  # type: ignore
    "no data": (lambda: pretrain.pretrain(None, {"DATA.TRAIN": [Path("a"), Path("b")]}), "'a'"),
    "a key that is no name": (lambda: pretrain.pretrain("", {1: 2}), "key 1", "int"),  # type: ignore
    "no path": (lambda: pretrain.load_backbone(None), "path", "NoneType"),  # type: ignore
    "an empty path": (lambda: pretrain.load_backbone(""), "path", "empty"),
    "a number": (lambda: pretrain.load_backbone(3), "path", "int"),  # type: ignore
    "no file to fine-tune with": (lambda: fine_tune(""), "config_file", "empty"),
    "words to fine-tune with": (lambda: fine_tune("a.yaml", ["SEED", 1]), "list", "dictionary"),  # type: ignore
    "words for a detector": (lambda: load_detector("a", ["SEED", 1]), "list", "dictionary"),  # type: ignore
    "no detector": (lambda: load_detector(None), "source", "NoneType"),  # type: ignore
    "no backbone": (lambda: convert("", "x.pth"), "source", "empty"),
    "no output": (lambda: convert("x.pth", None), "output", "NoneType"),  # type: ignore
    "no means": (lambda: convert("x.pth", "y.pth", pixel_mean=0.5), "pixel_mean", "one number per channel"),  # type: ignore
    "no engine": (lambda: fine_tune(RECIPE, engine=None), "engine None is not one of auto"),  # type: ignore
}


@pytest.mark.parametrize("call", REFUSED)
def test_arguments_of_another_kind_are_one_line(call: str):
    function, *names = REFUSED[call]
    refused(function, *names)


def test_a_home_in_a_path_is_replaced(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a shell does it, which a notebook has not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    state = build_backbone("resnet18", "imagenet").state_dict()
    torch.save(state, tmp_path / "plain.pth")
    assert torch.equal(pretrain.load_backbone("~/plain.pth").conv1.weight, state["conv1.weight"])
    conversion = convert("~/plain.pth", "~/d2.pth", pixel_mean=np.full(3, 0.5), pixel_std=(1, 1, 1))
    assert conversion.output == tmp_path / "d2.pth" and conversion.output.is_file()
    assert (conversion.provenance.input or InputFormat()).mean == [0.5] * 3
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    assert read_any("~/a.png", "image").shape == read_any("$HOME/a.png", "image").shape == (6, 8, 3)
    folder = PurePosixPath(tmp_path / "run")
    keys = {**keys_of(images, tmp_path), "MODEL.STEM": "imagenet", "OUTPUT_DIR": folder, "SOLVER.MAX_STEPS": 1}
    pretrain.pretrain(overrides=keys | {"MODEL.WEIGHTS": "~/plain.pth"})
    assert (tmp_path / "run/results.json").is_file()
    cfg = load_config(RECIPE, ["MODEL.WEIGHTS", "$HOME/gone.pth"])
    assert f"{tmp_path}/gone.pth" == cfg.MODEL.WEIGHTS


def test_weights_are_loaded_and_converted_as_by_a_command_whatever_the_modes_of_the_caller(tmp_path: Path):
    file = tmp_path / "plain.pth"
    torch.save(build_backbone("resnet18", "imagenet").state_dict(), file)
    with torch.inference_mode():
        assert not pretrain.load_backbone(file).conv1.weight.is_inference()
    (tmp_path / "detector.yaml").write_text(f"_BASE_: {RECIPE}\nMODEL: {{WEIGHTS: {file}}}\n")
    torch.set_default_dtype(torch.float64)
    try:
        refused(lambda: pretrain.load_backbone(file), "torch.set_default_dtype(torch.float32)")
        refused(lambda: convert(file, tmp_path / "d2.pth"), "torch.set_default_dtype(torch.float32)")
        refused(lambda: load_detector(tmp_path / "detector.yaml"), "torch.set_default_dtype(torch.float32)")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_removed_working_folder_is_one_line(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    with contextlib.chdir(tmp_path):
        os.chdir("notebooks")
        (tmp_path / "notebooks").rmdir()
        refused(lambda: pretrain.pretrain(overrides=keys_of(images, tmp_path / "run")), "working folder", "os.chdir")


def in_modes() -> dict[str, Any]:
    return {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }


def test_a_callers_modes_change_nothing(images: Path, tmp_path: Path):
    pretrain.pretrain(overrides={**keys_of(images, tmp_path / "plain")})
    plain = torch.load(tmp_path / "plain/checkpoint_final.pth", weights_only=True)["state_dict"]
    for name, mode in in_modes().items():
        with mode:
            pretrain.pretrain(overrides={**keys_of(images, tmp_path / name)})
        weights = torch.load(tmp_path / name / "checkpoint_final.pth", weights_only=True)["state_dict"]
        assert all(torch.equal(weights[key], value) for key, value in plain.items()), name


def test_defaults_of_the_whole_process_are_refused(images: Path, tmp_path: Path):
    call = functools.partial(pretrain.pretrain, overrides=keys_of(images, tmp_path / "run"))
    torch.set_default_dtype(torch.float64)
    try:
        refused(call, "float64", "set_default_dtype")
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        refused(call, "meta", "set_default_device")
    assert not (tmp_path / "run").exists()


def _pretrain_in_pool(keys: dict[str, str]) -> str:
    return pretrain.pretrain(overrides=keys)["stage"]


def test_a_worker_of_a_pool_reads_the_images_itself(images: Path, tmp_path: Path):
    """It is daemonic, so that it cannot have loader workers."""
    keys = {**keys_of(images, tmp_path / "run"), "DATALOADER.NUM_WORKERS": "2"}
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # autograd fails in a fork of a process that used it
        assert pool.apply(_pretrain_in_pool, (keys,)) == "pretrain"
    assert "cannot start loader workers" in (tmp_path / "run/log.txt").read_text()


def test_runs_in_threads_do_not_see_each_other(images: Path, tmp_path: Path):
    """They run in turn, and their results are those of a run alone."""
    keys = [keys_of(images, tmp_path / name) for name in ("a", "b", "alone")]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(_pretrain_in_pool, keys[:2])) == ["pretrain"] * 2
    pretrain.pretrain(overrides=keys[2])
    assert_same_end(tmp_path / "a", tmp_path / "alone")
    assert_same_end(tmp_path / "b", tmp_path / "alone")
    assert (tmp_path / "a/log.txt").read_text().count("done: ") == 1


def _take_turn(reason: str) -> None:
    stop = interrupt.StopRequest()
    stop.make(reason)
    with interface.take_turn(stop):
        pass


def test_a_run_that_waits_for_another_thread_can_be_stopped():
    with ThreadPoolExecutor(1) as threads, interface.take_turn(interrupt.StopRequest()):
        with pytest.raises(interrupt.Stopped, match="SIGINT"):
            threads.submit(_take_turn, "SIGINT").result()
        _take_turn("")  # a run within a run, in one thread


def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent():
    with ThreadPoolExecutor(1) as threads:
        turn = interface.take_turn(interrupt.StopRequest())
        threads.submit(turn.__enter__).result()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(_take_turn, ("SIGTERM",))
        threads.submit(turn.__exit__, None, None, None).result()


def test_a_run_in_asyncio(images: Path, tmp_path: Path):
    async def run() -> str:
        return await asyncio.to_thread(_pretrain_in_pool, keys_of(images, tmp_path / "run"))

    assert asyncio.run(run()) == "pretrain"
