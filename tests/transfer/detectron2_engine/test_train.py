"""The Detectron2 engine on six drawn images: three detectors, one and two processes, strict weights, resume."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from tests.transfer.test_convert import resnet_state
from transfer.convert import convert
from transfer.resnet_names import PREFIX
from transfer.train_net import argument_parser, main, spawn, work

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
pytestmark = pytest.mark.detectron2

KINDS: dict[str, dict[str, Any]] = {
    "faster": {},
    "mask": {"MODEL.MASK_ON": True},
    "keypoint": {"MODEL.KEYPOINT_ON": True, "MODEL.ROI_HEADS.NUM_CLASSES": 1},
}
QUICK = {"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": [], "TEST.PRECISE_BN.ENABLED": True, "TEST.PRECISE_BN.NUM_ITER": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.save(resnet_state(head=False), folder / "r18.pth")
    convert(folder / "r18.pth", folder / "w.pth")
    return folder / "w.pth"


def command(tmp_path: Path, name: str, *flags: str, **keys: Any) -> list[str]:
    """A command line of train_net for a tiny detector; keys with `__` for dots."""
    (tmp_path / "empty.yaml").write_text("VERSION: 2\n")
    given = {key.replace("__", "."): value for key, value in keys.items()}
    data = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (name,), "OUTPUT_DIR": str(tmp_path / "out")}
    words = tiny_coco.words(tiny_coco.MODEL_KEYS | QUICK | data | given)
    return ["--config-file", str(tmp_path / "empty.yaml"), "--engine", "detectron2", *flags, *words]


def go(tmp_path: Path, name: str, *flags: str, **keys: Any) -> dict[str, Any]:
    return work(argument_parser().parse_args(command(tmp_path, name, *flags, **keys)))


@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_evaluates(tmp_path: Path, weights: Path, kind: str) -> None:
    name = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    keys = {key.replace(".", "__"): value for key, value in KINDS[kind].items()}
    results = go(tmp_path, name, "--visualize", "2", MODEL__WEIGHTS=str(weights), **keys)
    out = tmp_path / "out"
    tasks = {"faster": ["bbox"], "mask": ["bbox", "segm"], "keypoint": ["bbox", "keypoints"]}[kind]
    assert list(results["metrics"]) == tasks
    assert json.loads((out / "results.json").read_text()) == results
    assert results["engine"] == {"name": "detectron2", "version": "0.6"}
    assert results["iteration"] == 2 and results["protocol"]["detector"] == kind
    assert results["protocol"]["heads"] == "0conv2fc" and results["weights"]["provenance"]["source"] == "r18.pth"
    lines = [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]
    assert all(f"{task}/AP" in lines[-1] for task in tasks)
    assert "NaN" not in (out / "metrics.json").read_text()
    assert len(list((out / "visualizations").glob("*.jpg"))) == 2
    assert len(list(out.glob("inference/annotations_*/coco_instances_results.json"))) == 1
    assert {"config.yaml", "environment.txt", "log.txt", "model_final.pth"} <= {p.name for p in out.iterdir()}


def test_starts_from_the_weights_and_evaluates_what_it_trained(tmp_path: Path, weights: Path) -> None:
    name = tiny_coco.write(tmp_path / "data")
    first = go(tmp_path, name, MODEL__WEIGHTS=str(weights), SOLVER__BASE_LR=0.0, TEST__PRECISE_BN__ENABLED=False)
    trained = torch.load(tmp_path / "out" / "model_final.pth")["model"]
    for key, tensor in torch.load(weights)["model"].items():
        if "running_" not in key and "num_batches" not in key:
            assert torch.equal(trained[key], tensor), key
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "random: backbone.fpn, " in log and "roi_heads.box_predictor" in log
    final = str(tmp_path / "out" / "model_final.pth")
    again = go(tmp_path, name, "--eval-only", MODEL__WEIGHTS=final, OUTPUT_DIR=str(tmp_path / "eval"))
    assert again["metrics"] == first["metrics"] and again["iteration"] is None
    with pytest.raises(UserError, match=r"holds a backbone only, no detector"):
        go(tmp_path, name, "--eval-only", MODEL__WEIGHTS=str(weights))
    with pytest.raises(UserError, match=r"MODEL\.WEIGHTS is empty; name a fine-tuned detector, or add --resume"):
        go(tmp_path, name, "--eval-only")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == first
    back = convert(tmp_path / "out", tmp_path / "plain.pth", back=True)  # a fine-tuned detector's backbone
    assert back.provenance["INPUT.FORMAT"] == "RGB" and "layer4.1.bn2.weight" in torch.load(tmp_path / "plain.pth")


def test_used_output_dir_resume_and_damaged_checkpoint(tmp_path: Path) -> None:
    name = tiny_coco.write(tmp_path / "data")
    go(tmp_path, name, SOLVER__MAX_ITER=4, SOLVER__CHECKPOINT_PERIOD=2)
    assert "the backbone starts from random values" in (tmp_path / "out" / "log.txt").read_text()
    with pytest.raises(UserError, match="--resume"):
        go(tmp_path, name)
    out = tmp_path / "out"
    (out / "model_final.pth").unlink()
    (out / "model_0000003.pth").write_bytes((out / "model_0000003.pth").read_bytes()[:4000])
    results = go(tmp_path, name, "--resume", SOLVER__MAX_ITER=5)
    log = (out / "log.txt").read_text()
    assert "trying the checkpoint before it" in log and "Starting training from iteration 2" in log
    assert results["iteration"] == 5
    (out / "model_final.pth").unlink()
    for path in out.glob("model_*.pth"):
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="every checkpoint"):
        go(tmp_path, name, "--resume")


def test_request_to_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    name = tiny_coco.write(tmp_path / "data")
    interrupt.request_stop("SIGUSR2")
    try:
        with pytest.raises(interrupt.Stopped, match="SIGUSR2"):
            go(tmp_path, name, SOLVER__MAX_ITER=3, SEED=-1)
    finally:
        interrupt.clear()
    seed = torch.load(tmp_path / "out" / "model_0000000.pth")["trainer"]["seed"]
    assert (tmp_path / "out" / "last_checkpoint").read_text() == "model_0000000.pth"
    assert not (tmp_path / "out" / "results.json").exists()
    go(tmp_path, name, "--resume", SOLVER__MAX_ITER=3, SEED=-1)
    assert torch.load(tmp_path / "out" / "model_final.pth")["trainer"]["seed"] == seed  # a random one stays
    assert "Starting training from iteration 1" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("mask", {"DATALOADER__NUM_WORKERS": 2, "TEST__EVAL_PERIOD": 2}),
        ("keypoint", {"DATALOADER__SAMPLER_TRAIN": "RepeatFactorTrainingSampler", "DATALOADER__REPEAT_THRESHOLD": 0.9}),
        ("faster", {"SOLVER__STEPS": [4]}),
    ],
)
def test_a_stopped_run_resumes_to_the_bit_equal_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, keys: dict[str, Any]
) -> None:
    from transfer.detectron2_engine import hooks as detectron2_hooks

    name = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    keys = {"SOLVER__MAX_ITER": 5, **{k.replace(".", "__"): v for k, v in KINDS[kind].items()}, **keys}
    expected = go(tmp_path, name, **keys, OUTPUT_DIR=str(tmp_path / "whole"))
    asked = iter(["", "", "SIGUSR2"])
    with monkeypatch.context() as patch:
        patch.setattr(detectron2_hooks, "stop_requested", lambda: next(asked))
        with pytest.raises(interrupt.Stopped, match="SIGUSR2"):
            go(tmp_path, name, **keys)
    torch.rand(5)
    found = go(tmp_path, name, "--resume", **keys)
    assert found["metrics"] == expected["metrics"]
    states = [torch.load(tmp_path / out / "model_final.pth") for out in ("whole", "out")]
    assert states[0]["trainer"]["seed"] == states[1]["trainer"]["seed"]
    momentum = [state["trainer"]["_trainer"]["optimizer"]["state"] for state in states]
    for number, state in momentum[0].items():
        assert torch.equal(state["momentum_buffer"], momentum[1][number]["momentum_buffer"])
    for key, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][key]), key


def test_the_stream_of_images_is_stock_detectron2s(tmp_path: Path) -> None:
    from detectron2.config import get_cfg
    from detectron2.data import build_detection_train_loader

    from transfer.detectron2_engine import data as detectron2_data

    name = tiny_coco.write(tmp_path / "data")
    cfg = get_cfg()
    cfg.merge_from_other_cfg(tiny_coco.config(tmp_path / "out", name, SEED=5))
    detectron2_data.register(name)
    own = detectron2_data.TrainingBatches(cfg, 5)
    ids = [[record["image_id"] for record in batch] for batch in itertools.islice(own, 9)]
    stock = itertools.islice(build_detection_train_loader(cfg), 9)
    assert ids == [[record["image_id"] for record in batch] for batch in stock]
    own.start = 4
    first = next(iter(own))
    assert [record["image_id"] for record in first] == ids[4]


def test_steps_that_fp16_skips_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    from transfer.detectron2_engine.hooks import CountSkippedSteps

    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    said: list[tuple[float, float]] = []
    storage = SimpleNamespace(put_scalars=lambda **v: said.append((v["loss_scale"], v["skipped_steps"])))
    trainer = SimpleNamespace(_trainer=SimpleNamespace(model=model), iter=0, max_iter=4, storage=storage)

    def train(hook: CountSkippedSteps, factors: dict[int, float]) -> None:
        hook.trainer = trainer  # type: ignore[assignment]
        for trainer.iter, factor in factors.items():
            hook.before_step()
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.ones(2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            hook.after_step()

    train(first := CountSkippedSteps(scaler), {0: torch.inf, 1: 1.0, 2: torch.inf})
    assert said == [(4.0, 0), (2.0, 1), (2.0, 1)] and first.state_dict() == {"skipped_steps": 2}
    resumed = CountSkippedSteps(scaler)
    resumed.load_state_dict(first.state_dict())
    train(resumed, {3: torch.inf})
    trainer.iter = 4
    with caplog.at_level(logging.INFO):
        resumed.after_train()
    assert "fp16: 3 of 4 steps were skipped" in caplog.text


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    name = tiny_coco.write(tmp_path / "data")
    (tmp_path / "data" / "3.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"cannot read image .*3\.png: cannot identify image file"):
        go(tmp_path, name, SOLVER__MAX_ITER=9, DATALOADER__NUM_WORKERS=1)


def spoil(path: Path, how: str) -> None:
    content = torch.load(path)
    name = f"{PREFIX}res3.1.conv1.weight"
    if how == "missing":
        del content["model"][name]
    elif how == "nan":
        content["model"][name][0, 0, 0, 0] = float("nan")
    elif how == "transposed":  # square: its shape still fits
        content["model"][name] = content["model"][name].transpose(0, 1).contiguous()
    elif how == "prefix":
        content["model"] = {"net." + key: tensor for key, tensor in content["model"].items()}
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:9999])
    else:
        torch.save(content, path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"lacks backbone.bottom_up.res3.1.conv1.weight"),
        ("nan", r"res3.1.conv1.weight has values that are not finite"),
        ("transposed", r"res3.1.conv1.weight is not what was converted"),
        ("prefix", r"holds no backbone.bottom_up"),
        ("truncated", "damaged"),
    ],
)
def test_bad_weights_end_the_run_before_it_starts(tmp_path: Path, weights: Path, how: str, message: str) -> None:
    name = tiny_coco.write(tmp_path / "data")
    shutil.copy(weights, tmp_path / "bad.pth")
    spoil(tmp_path / "bad.pth", how)
    with pytest.raises(UserError, match=message):
        go(tmp_path, name, MODEL__WEIGHTS=str(tmp_path / "bad.pth"))
    assert not (tmp_path / "out" / "metrics.json").exists()


@pytest.mark.slow
def test_two_processes(tmp_path: Path, weights: Path) -> None:
    name = tiny_coco.write(tmp_path / "data")
    words = command(tmp_path, name, "--num-gpus", "2", MODEL__WEIGHTS=str(weights), MODEL__ROI_BOX_HEAD__NORM="")
    main(words)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["metrics"]) == {"bbox"} and results["iteration"] == 2
    assert "MODEL.RESNETS.NORM is naiveSyncBN instead of SyncBN" in (tmp_path / "out" / "log.txt").read_text()
    with pytest.raises(UserError, match="holds an earlier run"):  # a rank's mistake is one line here, too
        spawn(argument_parser().parse_args(words))
