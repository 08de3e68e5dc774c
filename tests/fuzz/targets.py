"""What is fuzzed: readers of files that a user or a fault may have changed, each with valid files to begin from.

A reader may refuse a file with a UserError. If it accepts it, what it returns must be right as far as can be told.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import pickle
import random
import shlex
import shutil
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from pycocotools.coco import COCO
from safetensors import safe_open
from safetensors.numpy import save as save_arrays
from safetensors.torch import save as save_safetensors

from pretrain.common import checkpoint, curves, image_io, metrics
from pretrain.common.backbone_file import load_backbone
from pretrain.common.skipped_steps import SkippedSteps
from pretrain.config import default_config, from_yaml_text, load_config
from pretrain.datasets import ImageData, listing
from pretrain.datasets.packed import INDEX, load_packed, shard_path
from pretrain.probe import labels
from pretrain.probe.classifier import restored
from pretrain.probe.features import FeatureFile
from pretrain.probe.heads import Heads
from pretrain.state import find_checkpoint, from_checkpoint, to_checkpoint
from tests.fuzz import mutate
from tests.pretrain import runs
from tests.pretrain.images import write_folder
from tests.resnets import moco, resnet_state
from tests.transfer import tiny_coco
from tools.data.pack import splits_of, write_packed
from tools.launcher import commands, control, pipeline, resolve, stages, status, sweep
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec
from tools.report import gather
from transfer.averaging import AveragedWeights
from transfer.coco import check, data
from transfer.config import default_config as detector_defaults
from transfer.config import load_config as load_detector_config
from transfer.convert import read_source
from transfer.torchvision_engine.data import load_coco
from transfer.torchvision_engine.solver import build_optimizer
from transfer.torchvision_engine.state import State
from transfer.torchvision_engine.state import find_checkpoint as find_detector
from transfer.weights import Weights, load_weights

CONFIGS = Path(__file__).parents[2] / "configs"
_TENSORS = (
    torch.zeros(()), torch.zeros(0), torch.zeros(2, 3), torch.full((64,), float("nan")),
    torch.ones(64, dtype=torch.int64),
    torch.ones(64).to_sparse(), torch.empty(64, device="meta"), torch.ones(64, dtype=torch.complex64), -torch.ones(64),
    torch.ones(64, dtype=torch.float8_e4m3fn), torch.zeros(1).expand(10**6),
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A reader, and how to make files for it.

    Attributes:
        name: of the file that it reads.
        read: given the file; raises UserError, or returns.
        draw: a mutated file's bytes.
    """

    name: str
    read: Callable[[Path], Any]
    draw: Callable[[random.Random], bytes]


def targets(root: Path) -> dict[str, Target]:
    """All targets; ``root`` is a folder for what they share."""
    return {
        "pretraining_config": Target("a.yaml", _pretraining_config, _text(_yaml(CONFIGS / "pretrain", "*R18*.yaml"))),
        "detector_config": Target("a.yaml", _detector_config, _text(_yaml(CONFIGS, "demo_*.yaml"))),
        "overrides": Target("words.txt", _overrides, _words),
        "pipeline": Target("p.yaml", _load(pipeline), _text(_yaml(CONFIGS / "pipeline", "**/*.yaml"))),
        "sweep": Target("s.yaml", _load(sweep), _text(_yaml(CONFIGS / "pretrain/sweeps", "*.yaml"))),
        "site": Target("cluster.yaml", lambda file: resolve.resolve({"cluster": "local"}, str(file)), _text(_SITES)),
        "launch.json": Target("launch/launch.json", _launch, _json([_launch_record(root)])),
        "results.json": Target("results.json", lambda file: gather([file.parent]), _json(_results(root))),
        "coco": Target("annotations.json", _coco(root / "coco"), _json(_coco_contents(root / "coco"))),
        "image": Target("a.img", _image, lambda rng: mutate.data(rng, _IMAGES)),
        "checkpoint": Target("checkpoint_00000004.pth", _checkpoint(root), _torch(_checkpoints(root))),
        "checkpoint_probe": Target("checkpoint_00000004.pth", _probe, _torch([_probe_state()])),
        "checkpoint_torchvision": Target("model_0000004.pth", _detector, _torch([_detector_state()])),
        "weights_pth": Target("a.pth", _weights, _torch(_STATES)),
        "weights_pkl": Target("a.pkl", _weights, _pickled),
        "weights_safetensors": Target("a.safetensors", _weights, _safetensors),
        "packed": Target("train/index.safetensors", _packed(root), _indices("packed", _packed_index(root))),
        "listing": Target("kept.safetensors", _listing, _indices("listing", _LISTING)),
        "features": Target("features_val.0.pth", _features, _torch([_FEATURES])),
        "metrics.json": Target("metrics.json", _metrics, _metrics_lines),
        "labels": Target("1percent.txt", _labels, lambda rng: mutate.data(rng, _NAMES)),
    }  # fmt: skip


def _load(module: Any) -> Callable[[Path], Any]:
    return lambda file: module.load(str(file))


def _yaml(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted(folder.glob(pattern))]


def _text(values: list[Any]) -> Callable[[random.Random], bytes]:
    """YAML: three of four files have a changed value, the others a changed byte."""
    texts = [yaml.safe_dump(value).encode() for value in values]

    def draw(rng: random.Random) -> bytes:
        if rng.randrange(4) == 0:
            return mutate.data(rng, texts)
        changed = mutate.value(rng, rng.choice(values))
        return yaml.dump(changed, allow_unicode=rng.random() < 0.5).encode(errors="surrogatepass")

    return draw


def _json(values: list[Any]) -> Callable[[random.Random], bytes]:
    texts = [json.dumps(value).encode() for value in values]

    def draw(rng: random.Random) -> bytes:
        if rng.randrange(4) == 0:
            return mutate.data(rng, texts)
        return json.dumps(mutate.value(rng, rng.choice(values))).encode()

    return draw


def _torch(values: list[Any]) -> Callable[[random.Random], bytes]:
    files = [_saved(value) for value in values]

    def draw(rng: random.Random) -> bytes:
        how = rng.randrange(4)
        if how == 0:
            return mutate.data(rng, files)
        if how == 1:
            return _changed_inside(rng, rng.choice(files))
        return _saved(mutate.value(rng, rng.choice(values), _TENSORS))

    return draw


def _changed_inside(rng: random.Random, file: bytes) -> bytes:
    """With changed bytes in its pickle, or in a tensor, and checksums that are right."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as archive, zipfile.ZipFile(changed, "w") as made:
        names = archive.namelist()
        pickled = [name for name in names if name.endswith("/data.pkl")]
        which = rng.choice(names if rng.randrange(8) == 0 else pickled)
        for name in names:
            content = archive.read(name)
            made.writestr(name, mutate.data(rng, [content]) if name == which else content)
    return changed.getvalue()


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# Weights without bytes: every tensor is one number, repeated.
_RESNET = {name: torch.full((), 0.5, dtype=t.dtype).expand(t.shape) for name, t in resnet_state().items()}
_STATES = [dict(_RESNET), {"state_dict": dict(_RESNET)}, moco(_RESNET, _RESNET)]
_BLOBS = {
    "model": {name: np.full((), 0.5, np.float32) for name in _RESNET},
    "__author__": "x",
    "matching_heuristics": True,
}


def _pickled(rng: random.Random) -> bytes:
    if rng.randrange(40) == 0:
        network = {name: tensor.numpy() for name, tensor in _network().items()}
        return pickle.dumps(mutate.value(rng, {"model": network, "provenance": _PROVENANCE}), protocol=2)
    arrays = (np.array([None]), np.array(["a"]), np.zeros((2, 3)), np.float32(1), np.zeros(64, ">f4"), np.zeros(0))
    if rng.randrange(2) == 0:
        return mutate.data(rng, [pickle.dumps(_BLOBS, protocol=protocol) for protocol in (2, 5)])
    return pickle.dumps(mutate.value(rng, _BLOBS, arrays), protocol=2)


_PROVENANCE = {"source": "a.pth", "arch": "resnet18", "epoch": 1, "config": "METHOD:\n  NAME: jcl\n"}


@functools.cache
def _network() -> dict[str, torch.Tensor]:
    """23 MB, because these formats cannot repeat a number; therefore one of forty files."""
    return {name: tensor.half() for name, tensor in resnet_state().items()}


def _safetensors(rng: random.Random) -> bytes:
    if rng.randrange(40) == 0:
        about = {"provenance": json.dumps(mutate.value(rng, _PROVENANCE))}
        content = save_safetensors(_network(), about)
        if rng.randrange(2):
            return content
        end = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(mutate.value(rng, json.loads(content[8:end]))).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]
    tensors = {"a.weight": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.float16)}
    return mutate.data(rng, [save_safetensors(tensors, {"provenance": "{}"}), save_safetensors(tensors)])


def _weights(file: Path) -> None:
    for read in (load_backbone, read_source):
        found = read(file)
        backbone = found[0] if isinstance(found, tuple) else found
        assert all(torch.isfinite(tensor).all() for tensor in backbone.state_dict.values())


def _pretraining_config(file: Path) -> None:
    cfg = load_config(file, [])
    assert from_yaml_text(cfg.dump()).dump() == cfg.dump()


def _detector_config(file: Path) -> None:
    load_detector_config(file, []).dump()


def _words(rng: random.Random) -> bytes:
    keys = [f"{block}.{key}" for block, keys in default_config().items() if isinstance(keys, dict) for key in keys]
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        words += [rng.choice(keys), str(rng.choice([*mutate.NASTY, "0.1", "1e-3", "[1,2]", "jcl", "True"]))]
    text = shlex.join(words).encode(errors="replace")
    return mutate.data(rng, [text]) if rng.randrange(3) == 0 else text


def _overrides(file: Path) -> None:
    try:
        words = shlex.split(file.read_text(errors="surrogateescape"))
    except ValueError:  # an open quote: no shell would pass it on
        return
    load_config(None, words)


_SITES = [
    {"cluster": "local", "gpus": "0", "stages": {"convert": {"gpus": "0"}}},
    {"cluster": "slurm", "account": "0042", "time": "4:00:00", "partition": "a,b", "setup": ["module load cuda"],
     "sbatch": {"constraint": "h100", "exclusive": ""}, "max-timeouts": "3", "stages": {"linear": {"gpus": "1"}}},
]  # fmt: skip


def _launch_record(root: Path) -> dict[str, Any]:
    spec = stages.probe("knn", "random", "", ["OUTPUT_DIR", str(root / "run")])
    job = {"id": "1", "cluster": "local", "name": "knn", "logs": str(root), "host": "h", "tasks": 1, "started": 0.5}
    return {"spec": spec.to_json(), "options": {**asdict(Options(cluster="local")), "setup": []}, "jobs": [job]}


def _launch(file: Path) -> None:
    status.print_status(file.parents[1])
    record = control.read_launch(file)
    spec = StageSpec.from_json(record["spec"])
    resolve.from_record(record, file)
    assert commands.ENTRIES.get(spec.stage) is None or isinstance(spec.fingerprint(), str)


def _results(root: Path) -> list[Any]:
    from tests.tools.reporting.runs import detector, pretrain, probe, provenance

    config = pretrain(root / "reported")
    probe(root / "probed", config, 50.0)
    found = [json.loads((root / name / "results.json").read_text()) for name in ("reported", "probed")]
    return [*found, detector(weights=provenance(config))]


def _coco_contents(folder: Path) -> list[Any]:
    found = []
    for kind in ({}, {"keypoints": True}, {"rle": True}):
        tiny_coco.write(folder, **kind)
        found.append(json.loads((folder / "annotations.json").read_text()))
    return found


def _coco(images: Path) -> Callable[[Path], None]:
    def read(file: Path) -> None:
        content = data.read(file)
        if not list(check.check(content, images)):
            load_coco(f"coco:{file}:{images}")
        truth = COCO(str(file))
        for annotation in truth.dataset["annotations"]:
            if annotation.get("segmentation") and annotation["image_id"] in truth.imgs:
                truth.annToMask(annotation)

    return read


def _pictures() -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    forms = [
        ("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "I;16", {}), ("PNG", "RGBA", {}), ("JPEG", "RGB", {"exif": exif}),
        ("JPEG", "CMYK", {}), ("JPEG", "L", {"progressive": True}), ("WEBP", "RGB", {}), ("BMP", "RGB", {}),
        ("GIF", "P", {}), ("TIFF", "RGB", {"compression": "tiff_lzw"}), ("PPM", "RGB", {}),
    ]  # fmt: skip
    found = []
    for form, mode, more in forms:
        image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
        file = io.BytesIO()
        image.save(file, form, **more)
        found.append(file.getvalue())
    return found


_IMAGES = _pictures()


def _image(file: Path) -> None:
    found = image_io.decode(file.read_bytes(), "a")
    assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3 and found.size
    image_io.open_upright(str(file))


def _indices(key: str, content: dict[str, Any]) -> Callable[[random.Random], bytes]:
    """Arrays in a safetensors file whose metadata hold JSON; half of the files have changed bytes."""

    def saved(given: dict[str, Any]) -> bytes:
        return save_arrays(given["arrays"], {key: json.dumps(given["about"])})

    def draw(rng: random.Random) -> bytes:
        if rng.randrange(2) == 0:
            return mutate.data(rng, [saved(content)])
        changed = {**content, "arrays": dict(content["arrays"])}
        if rng.randrange(2) == 0:
            changed["about"] = mutate.value(rng, content["about"])
        name = rng.choice([*changed["arrays"]])
        array = changed["arrays"].pop(name).copy()
        if (how := rng.randrange(4)) == 0:
            array = rng.choice((array[:-1], array.astype(np.float64), array[None], array[:0], array.astype(np.int32)))
        elif how <= 2:
            limits = np.iinfo(array.dtype)
            array[rng.randrange(len(array))] = rng.choice((0, 1, 77, limits.max, limits.min))
        if how <= 2 or rng.randrange(4):
            changed["arrays"][name] = array
        return saved(changed)

    return draw


def _packed_index(root: Path) -> dict[str, Any]:
    write_folder(root / "unpacked", ["train/ant/1.png", "train/ant/2.png", "train/bee/3.png"])
    write_packed(root / "packed", splits_of(root / "unpacked"), 0, 90)
    with safe_open(root / "packed/train" / INDEX, "numpy") as opened:
        about = json.loads(opened.metadata()["packed"])
        return {"about": about, "arrays": {name: opened.get_tensor(name) for name in opened.keys()}}  # noqa: SIM118


def _packed(root: Path) -> Callable[[Path], None]:
    def read(file: Path) -> None:
        shutil.copy(shard_path(root / "packed/train", 0), file.parent)
        found = load_packed(file.parents[1], "train")
        _look_at(found)
        for index in range(min(len(found), 5)):
            found.read(index)

    return read


def _look_at(data: ImageData) -> None:
    """What every stage does with a data set."""
    assert all(isinstance(name, str) for name in data.classes)
    if data.labels is not None:
        assert data.labels.shape == (len(data),)
        assert all(-1 <= label < len(data.classes) for label in data.labels.tolist())
    for index in range(min(len(data), 5)):
        data.image_name(index)


_LISTING = {
    "about": {"key": "k", "listed": {}, "folder": "/images", "classes": ["ant", "bee"]},
    "arrays": {
        "text": np.frombuffer(b"ant/1.pngbee/2.png", np.uint8), "ends": np.array([9, 18]), "labels": np.array([0, 1]),
    },
}  # fmt: skip


def _listing(file: Path) -> None:
    if found := listing.read(file, "k"):
        _look_at(found)


_MINE = np.array([2, 3, 5, 8, 9])
_FEATURES = {
    "made_from": {"weights": "a"}, "images": hashlib.sha256(_MINE.tobytes()).hexdigest(), "done": 4,
    "index_N": torch.tensor([2, 3, 8]),
    "features_NF": torch.ones(3, 8),
}  # fmt: skip


def _features(file: Path) -> None:
    if found := FeatureFile(file, {"weights": "a"}, lambda _: None).load(_MINE, 8):
        done, index_N, features_NF = found
        assert done >= len(index_N) and features_NF.shape == (len(index_N), 8)
        assert set(index_N.tolist()) <= set(_MINE.tolist())


def _metrics_lines(rng: random.Random) -> bytes:
    line = {"iteration": 9, "loss": 1.5, "total_loss": 0.5, "images_per_second": 80.0, "eta_seconds": 3.0}
    text = [json.dumps({**line, "iteration": n}).encode() + b"\n" for n in range(3)]
    if rng.randrange(2) == 0:
        return mutate.data(rng, [b"".join(text)])
    return b"".join(text) + json.dumps(mutate.value(rng, line)).encode() + b"\n"


def _metrics(file: Path) -> None:
    status.progress(file.parent)
    metrics.drop_metrics(file.parent, 10)
    metrics.append(file, 10, {"loss": 0.5})
    found = metrics.read_metrics(file.parent)
    assert found[-1] == {"iteration": 10, "loss": 0.5} and all(line["iteration"] < 10 for line in found[:-1])
    for drawn in curves.points(found).values():
        Axes(Figure(), (0, 0, 1, 1)).plot(*zip(*drawn, strict=True))


_NAMES = [b"n01_1.JPEG\nn02_2.JPEG\n", b"ant/n01_1.JPEG\r\nbee/n02_2.JPEG"]


def _labels(file: Path) -> None:
    names = [f"{c}/{n}_{i}.JPEG" for c, n, i in (("ant", "n01", 1), ("ant", "n01", 2), ("bee", "n02", 2))]
    data = ImageData(image_io.Files("/images", names), np.array([0, 0, 1]), ["ant", "bee"])
    labels.identity(str(file))
    assert 0 < len(labels.chosen(data, str(file))) < 3


def _checkpoints(root: Path) -> list[Any]:
    cfg = _checkpoint_config(root)
    training = runs.training(cfg)
    state = to_checkpoint(training, cfg, 4, 6, 0)
    state["state_dict"] = {
        name: torch.full((), 0.5).to(t.dtype).expand(t.shape) for name, t in state["state_dict"].items()
    }
    return [state]


def _checkpoint_config(root: Path) -> Any:
    return load_config(None, runs.overrides(root / "images", root / "pretrained"))


def _checkpoint(root: Path) -> Callable[[Path], None]:
    cfg = _checkpoint_config(root)
    training = runs.training(cfg)
    optimizer = training.optimizer
    options, clean = optimizer.param_groups, optimizer.state

    def read(file: Path) -> None:
        optimizer.param_groups = [dict(group) for group in options]  # the file before may have changed them
        optimizer.state = defaultdict(dict, {parameter: dict(state) for parameter, state in clean.items()})
        checkpoint.read(file)
        found = find_checkpoint(cfg, file.parent, lambda _: None)
        assert found is not None
        step = from_checkpoint(training, found[1], lambda _: None)
        assert step >= 0 and all(torch.isfinite(p).all() for p in training.objective.model.parameters())

    return read


def _probe_heads() -> Heads:
    settings = default_config().LINEAR
    settings.LRS = [1.0, 10.0]
    return Heads(4, 3, settings)


def _probe_state() -> dict[str, Any]:
    heads = _probe_heads()
    for parameter in heads.parameters():  # a step here would leave torch's threads to the process that is forked
        heads.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return {**heads.state(), "step": 4, "losses": torch.ones(2)}


def _probe(file: Path) -> None:
    heads = _probe_heads()
    step, losses = restored(heads, checkpoint.read(file), torch.zeros(2), 9)
    assert 0 <= step <= 9 and losses.shape == (2,)
    heads.set_rates(0)
    heads.step(torch.ones(2, 4), torch.tensor([0, 2]))


class _Training(State):
    """The state of a training without data, of a model with one layer."""

    def __init__(self) -> None:
        self.cfg = detector_defaults()
        model = torch.nn.Linear(4, 3)
        self.model, self.device, self.world, self.log = (
            cast(Any, model),
            torch.device("cpu"),
            1,
            logging.getLogger("fuzz"),
        )
        self.optimizer, self.rate = build_optimizer(self.cfg.SOLVER, model), lambda _: 0.1
        self.scaler, self.average = torch.amp.GradScaler("cpu", enabled=False), AveragedWeights(model, 0.5)
        self.skipped, self.window, self.writer = SkippedSteps("x"), deque(maxlen=20), None


def _detector_state() -> dict[str, Any]:
    training = _Training()
    weights, steps = training.model.state_dict(), [{"total_loss": 1.0, "time": 0.5, "data_time": 0.1}] * 2
    return {
        "model": weights, "trained": weights, "optimizer": training.optimizer.state_dict(), "scaler": {},
        "iteration": 4, "seed": 1, "window": steps, "skipped_steps": 0, "engine": "torchvision", "config": "",
    }  # fmt: skip


def _detector(file: Path) -> None:
    training = _Training()
    training.cfg.OUTPUT_DIR = str(file.parent)
    found = find_detector(training.cfg, training.log)
    assert found
    path, content = found
    start = content["iteration"] + 1
    load_weights(training.model.state_dict, Weights(str(path), "", content.pop("model"), {}), require_heads=True)
    training.restore(content)
    assert start >= 0
    training.window.append({"total_loss": 1.0, "time": 0.5, "data_time": 0.1})
    training.summary(start)
    training.model(torch.ones(2, 4)).sum().backward()
    training.optimizer.step()
