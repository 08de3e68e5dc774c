"""The user's data sets, mappers and hooks, and other names of Detectron2's DatasetCatalog."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.common.config import extensions
from pretrain.common.files import read_json
from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import HOOKS, MAPPERS, preflight
from transfer.coco.names import locate_data_set

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "templates" / "my_detection.py"


def work(folder: Path, name: str, *flags: str, **keys: Any) -> dict[str, Any]:
    return tiny_coco.train(folder, name, "detectron2", *flags, **keys)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]


@pytest.mark.docs
@pytest.mark.detectron2
def test_the_command_of_the_template_runs(tmp_path: Path) -> None:
    """The command at the top of the template runs, for fewer steps; the launcher imports the module in its way, too."""
    command = re.search(r"train_net\.py (.+?)\n\n", TEMPLATE.read_text().replace("\\\n", " ") + "\n\n", re.DOTALL)
    assert command
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command[1].split('"""')[0])]
    template_keys = ("INPUT", "MODEL.ROI_HEADS.N")  # keys that the template sets
    small = {key: value for key, value in tiny_coco.MODEL_KEYS.items() if not key.startswith(template_keys)}
    small |= {"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": [], "TEST.PRECISE_BN.NUM_ITER": 1, "OUTPUT_DIR": str(tmp_path)}
    words = [sys.executable, "transfer/train_net.py", *words, *tiny_coco.words(small)]
    environment = {name: value for name, value in os.environ.items() if name != extensions.VARIABLE}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"next: python tools/launch.py report {tmp_path}"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"]["bbox"].keys() >= {"AP", "AP-small", "AP-middle", "AP-large"}
    assert results["protocol"]["train"] == ["squares_train"]
    weight = torch.load(tmp_path / "model_final.pth")["model"]["roi_heads.box_predictor.cls_score.weight"]
    assert lines(tmp_path)[0]["weight_norm"] == pytest.approx(weight.norm().item(), rel=1e-6)
    assert f"P2T_IMPORT={TEMPLATE}" in (tmp_path / "environment.txt").read_text()


@pytest.fixture
def register(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Register the tiny data set under a name, with other metadata or records; return the name."""
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.data.datasets import load_coco_json

    annotations, images = tiny_coco.write(tmp_path / "data").split(":")[1:]
    names = []

    def add(**metadata: Any) -> str:
        def read() -> list[dict[str, Any]]:
            records = load_coco_json(annotations, images)
            ids = {7: 0, 14: 1, 21: 2}  # without a data set's name, the labels are the file's ids
            for record in records:
                for annotation in record["annotations"]:
                    annotation["category_id"] = ids[annotation["category_id"]]
            return records

        names.append(f"own_{len(names)}")
        DatasetCatalog.register(names[-1], read)
        MetadataCatalog.get(names[-1]).set(**{"thing_classes": ["c1", "c2", "c3"], "evaluator_type": "coco"} | metadata)
        return names[-1]

    yield add
    for name in names:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


@pytest.mark.detectron2
def test_own_records_train_and_score_as_the_file_they_are_from(
    tmp_path: Path, register: Callable[..., str], name: str
) -> None:
    a = work(tmp_path, register(), OUTPUT_DIR=str(tmp_path / "a"))
    b = work(tmp_path, name, OUTPUT_DIR=str(tmp_path / "b"))
    states = [torch.load(tmp_path / folder / "model_final.pth")["model"] for folder in "ab"]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for task in ("AP", "AP50", "AP-c2"):
        assert a["metrics"]["bbox"][task] == pytest.approx(b["metrics"]["bbox"][task], abs=1e-6)
    source = locate_data_set(name)
    name = register(json_file=str(source.annotations), image_root=str(source.images))
    assert locate_data_set(name) == dataclasses.replace(source, name=name)


@pytest.mark.detectron2
def test_a_mapper_and_a_hook_resume_to_the_same_result(tmp_path, register, monkeypatch):
    from detectron2.data import DatasetMapper
    from detectron2.engine import HookBase

    class Sum(HookBase):
        total = 0.0
        trainer: Any

        def after_step(self) -> None:
            self.total += self.trainer.model.roi_heads.box_predictor.cls_score.weight.detach().sum().item()

        def state_dict(self) -> dict[str, float]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.total = state["total"]

    def noisy(cfg: Any, is_train: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
        mapper = DatasetMapper(cfg, is_train)  # type: ignore[call-arg]  # Detectron2's decorator takes a config

        def add_noise(record: dict[str, Any]) -> dict[str, Any]:
            record = mapper(record)
            record["image"] = record["image"] + torch.as_tensor(np.random.randint(0, 9, record["image"].shape))
            return record

        return add_noise if is_train else mapper

    monkeypatch.setitem(MAPPERS, "noisy", noisy)
    monkeypatch.setitem(HOOKS, "sum", lambda cfg: Sum())
    keys: dict[str, Any] = {"INPUT__MAPPER": "noisy", "SOLVER__HOOKS": ("sum",), "DATASETS__TEST": ()}
    name = register()
    work(tmp_path, name, **keys, SOLVER__MAX_ITER=4, OUTPUT_DIR=str(tmp_path / "whole"))
    work(tmp_path, name, **keys)
    work(tmp_path, name, "--resume", **keys, SOLVER__MAX_ITER=4)
    whole = torch.load(tmp_path / "whole" / "model_final.pth")
    parts = torch.load(tmp_path / "out" / "model_final.pth")
    torch.testing.assert_close(whole["model"], parts["model"], rtol=0, atol=0)
    assert whole["hooks"] == parts["hooks"] and whole["hooks"]["sum"]["total"] != 0


def test_a_resumed_training_names_modules_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / "changed_later.py"
    module.touch()
    monkeypatch.setenv(extensions.VARIABLE, str(module))
    for iterations in (1, 2, 3):
        tiny_coco.train(tmp_path, name, "torchvision", "--resume", SOLVER__MAX_ITER=iterations, DATASETS__TEST=())
        module.write_text("# edited")
    log = (tmp_path / "out/log.txt").read_text()
    assert log.count("your modules have changed: changed_later.py") == 1


@pytest.mark.detectron2
def test_own_test_images_need_no_annotations(tmp_path: Path, register: Callable[..., str]) -> None:
    from detectron2.data import DatasetCatalog

    name = register()
    read = DatasetCatalog[name]
    DatasetCatalog[name] = lambda: [{**record, "annotations": []} for record in read()]
    tiny_coco.check_data_sets(tiny_coco.config(tmp_path / "out", name), [name])
    DatasetCatalog[name] = lambda: [{k: v for k, v in record.items() if k != "annotations"} for record in read()]
    refused(lambda: tiny_coco.check_data_sets(tiny_coco.config(tmp_path / "out", name), [name]), name, "annotations")
    tiny_coco.check_data_sets(tiny_coco.config(tmp_path / "out", name, DATASETS__TRAIN=()), [name])


@pytest.mark.detectron2
def test_metadata_are_checked_before_the_start(tmp_path: Path, register: Callable[..., str]) -> None:
    for key, value in (("evaluator_type", "sem_seg"), ("json_file", "nowhere.json")):
        cfg = tiny_coco.config(tmp_path, register(**{key: value}))
        refused(lambda cfg=cfg: preflight.check_inputs(cfg, eval_only=False, reads_weights=True), "own_", value)
    four = ["c1", "c2", "c3", "c4"]
    cases = [([], "thing_classes"), (["c1"], "category_id=2"), (four, "MODEL.ROI_HEADS.NUM_CLASSES")]
    for classes, named in cases:
        cfg = tiny_coco.config(tmp_path, register(thing_classes=classes), DATASETS__TEST=())
        refused(lambda cfg=cfg: tiny_coco.check_data_sets(cfg, cfg.DATASETS.TRAIN), "own_", named)


def test_hooks_are_called_by_the_torchvision_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name) -> None:
    """The hook is an object with some of HookBase's methods."""

    class Norm:
        trainer: Any

        def before_train(self) -> None:
            assert (self.trainer.iter, self.trainer.start_iter, self.trainer.max_iter) == (0, 0, 2)
            self.iterations = []

        def after_step(self) -> None:
            self.iterations.append(self.trainer.iter)
            self.trainer.storage.put_scalar("norm", 1.5, smoothing_hint=False)

    hook = Norm()
    monkeypatch.setitem(HOOKS, "norm", lambda cfg: hook)
    tiny_coco.train(tmp_path, name, "torchvision", SOLVER__HOOKS=("norm",), DATASETS__TEST=())
    assert hook.iterations == [0, 1] and lines(tmp_path / "out")[-1]["norm"] == 1.5


@pytest.mark.parametrize("error", [ValueError("the plot has no axes"), SystemExit(3)])
def test_a_hook_that_fails_after_the_training_loses_no_results(tmp_path, monkeypatch, name, error) -> None:
    class Plot:
        def after_train(self) -> None:
            raise error

    monkeypatch.setitem(HOOKS, "plot", lambda cfg: Plot())
    keys: dict[str, Any] = {"SOLVER__HOOKS": ("plot",)}
    with pytest.raises(Exception, match=r"no axes|sys.exit\(3\)") as failed:
        tiny_coco.train(tmp_path, name, "torchvision", **keys)
    assert error in (failed.value, failed.value.__cause__)
    results = read_json(tmp_path / "out" / "results.json")
    assert results["iteration"] == 2 and "AP" in results["metrics"]["bbox"]
    assert read_json(tmp_path / "out" / "state.json")["state"] == "failed"
    keys |= {"TEST__EXPECTED_RESULTS": [["bbox", "AP", 99.0, 1.0]], "SOLVER__HOOKS": ()}
    shutil.rmtree(tmp_path / "out")
    actual = f"{results['metrics']['bbox']['AP']:.4f}"
    refused(lambda: tiny_coco.train(tmp_path, name, "torchvision", **keys), "bbox/AP", actual, 99, "results.json")
    assert read_json(tmp_path / "out" / "results.json")["metrics"] == results["metrics"]
