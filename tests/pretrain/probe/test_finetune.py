"""Fine-tuning of the whole network as a classifier: it learns as a plain loop does, resumes, and can be read again."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pretrain import distributed
from pretrain.common import checkpoint, interrupt
from pretrain.common.backbone_file import load_backbone
from pretrain.common.errors import UserError
from pretrain.config import load_config
from pretrain.encoder import build_backbone
from pretrain.probe import finetune, heads, knn
from pretrain.probe.classifier import Augmented
from pretrain.probe.data import probe_data
from pretrain.probe.features import extract
from pretrain.probe.run import probe_run
from tests.pretrain.images import write_folder
from tests.pretrain.ranks import run_ranks
from tools.launcher.spec import ROOT


def _config(images, output, *more):
    return load_config(None, [
        "MODEL.ARCH", "resnet18", "MODEL.STEM", "cifar", "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16",
        "FINETUNE.IMS_PER_BATCH", "16", "FINETUNE.EPOCHS", "3", "FINETUNE.STEPS", "[2]", "FINETUNE.BASE_LR", "0.5",
        "FINETUNE.BACKBONE_LR", "0.05", "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu", "OUTPUT_DIR", str(output),
        *more,
    ])  # fmt: skip


def _saved(folder):
    found = checkpoint.newest(folder)
    assert found is not None
    return found[1]


@pytest.fixture(autouse=True)
def _no_stop_is_left():
    yield
    interrupt.clear()


@pytest.fixture(scope="module")
def complete(images, tmp_path_factory):
    """The run folder of a whole fine-tuning."""
    folder = tmp_path_factory.mktemp("runs") / "complete"
    finetune.main(_config(images, folder), "random")
    return folder


def test_it_learns_as_a_plain_loop_does(images, complete, tmp_path):
    """Two learning rates, momentum, a step at epoch 2, batch norm in training mode."""
    cfg = _config(images, tmp_path / "stream")
    torch.manual_seed(cfg.SEED)
    backbone = build_backbone("resnet18", "cifar")
    torch.manual_seed(cfg.SEED)
    head = nn.Linear(512, 2)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(
        [{"params": head.parameters(), "lr": 0.5}, {"params": backbone.parameters(), "lr": 0.05}], momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.2)
    with probe_run(cfg, "finetune") as run:
        stream = Augmented(run, cfg.FINETUNE, backbone, probe_data(cfg).train)
    for step, batch in enumerate(stream.batches(0, 9), start=1):
        features, label = stream.features(batch)
        optimizer.zero_grad()
        F.cross_entropy(head(features), label).backward()
        optimizer.step()
        if step % 3 == 0:
            scheduler.step()
    saved = _saved(complete)["state_dict"]
    for name, wanted in {**backbone.state_dict(), "fc.weight": head.weight, "fc.bias": head.bias}.items():
        assert torch.equal(saved[name], wanted), name
    val = extract(backbone.eval(), probe_data(cfg).val, cfg, torch.device("cpu"))
    right = (head(val.features_NF).argmax(1) == val.labels_N).float().mean()
    assert json.loads((complete / "results.json").read_text())["metrics"]["top1"] == 100 * float(right)


def test_attempts_shorter_than_an_epoch_reach_the_same_end(images, complete, tmp_path, monkeypatch):
    """Each attempt is asked to stop in its second step; an epoch has three."""
    real, done, reached = heads.Heads.step, [], []

    def step(self, *batch):
        done.append(1)
        if len(done) % 2 == 0:
            interrupt.request_stop("asked")
        return real(self, *batch)

    monkeypatch.setattr(heads.Heads, "step", step)
    while not (tmp_path / "results.json").is_file():
        try:
            finetune.main(_config(images, tmp_path), "random")
        except interrupt.Stopped:
            interrupt.clear()
        reached.append(_saved(tmp_path)["step"])
    assert reached == [2, 4, 6, 8, 9]
    whole, parts = _saved(complete), _saved(tmp_path)
    assert all(torch.equal(value, parts["state_dict"][name]) for name, value in whole["state_dict"].items())
    for name in ("results.json", "metrics.json"):
        assert (complete / name).read_text() == (tmp_path / name).read_text()


def test_the_network_can_be_read_and_says_what_it_is(images, complete, tmp_path):
    file = load_backbone(complete)
    assert file.provenance["fine_tuned_on"] == [f"folder:{images}"] and file.head["weight"].shape == (2, 512)
    score = knn.main(_config(images, tmp_path, "PROBE.KNN_K", "5"), str(complete))["metrics"]["top1"]
    assert score > 90
    again = finetune.main(_config(images, tmp_path / "again", "FINETUNE.EPOCHS", "1"), str(complete))
    assert _saved(tmp_path / "again")["provenance"]["fine_tuned_on"] == [f"folder:{images}"] * 2
    assert again["source"]["fine_tuned_on"] == [f"folder:{images}"]


def test_its_file_names_the_pretraining_and_the_share_of_labels(images, complete, tmp_path):
    """Epoch and step are those of the pretraining, of which random weights have none."""
    assert load_backbone(complete).provenance["method"] == "random"
    pretrained = {"state_dict": build_backbone("resnet18", "cifar").state_dict(), "epoch": 2, "step": 6}
    checkpoint.save(tmp_path / "pretrained.pth", pretrained)
    cfg = _config(images, tmp_path / "run", "FINETUNE.EPOCHS", "1", "DATA.PROBE_LABELS", "50%")
    finetune.main(cfg, str(tmp_path / "pretrained.pth"))
    found = load_backbone(tmp_path / "run").provenance
    assert (found["epoch"], found["step"]) == (2, 6) and found["fine_tuned_on"] == [f"50% of folder:{images}"]
    assert "epoch" not in load_backbone(complete).provenance and "step" not in load_backbone(complete).provenance


@pytest.mark.parametrize("share", ["1pct", "10pct"])
def test_the_recipes_run_on_folders_in_imagenets_format(tmp_path, share):
    """The file and batch of 10% is named by a list, as SimCLR's; 1% is drawn."""
    names = [f"n0{c}/n0{c}_{i}.JPEG" for c in range(3) for i in range(4)]
    write_folder(tmp_path / "imagenet/train", names)
    write_folder(tmp_path / "imagenet/val", [f"n0{c}/ILSVRC2012_val_{c}.JPEG" for c in range(3)])
    listed = tmp_path / "list.txt"
    listed.write_text("n00_1.JPEG\nn01_3.JPEG\nn02_0.JPEG\nn02_1.JPEG\n")
    cfg = load_config(f"{ROOT}/configs/finetune/R50_IN1k_{share}.yaml", [
        "MODEL.ARCH", "resnet18", "DATA.ROOT", str(tmp_path), "VIEWS.IMAGE_SIZE", "32", "FINETUNE.IMS_PER_BATCH", "3",
        "FINETUNE.EPOCHS", "1", "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path / "run"),
        *(("DATA.PROBE_LABELS", str(listed)) if share == "10pct" else ()),
    ])  # fmt: skip
    recorded = finetune.main(cfg, "random")["protocol"]
    assert (recorded["train_images"], recorded["val_images"]) == (4 if share == "10pct" else 3, 3)
    assert (recorded["BACKBONE_LR"], recorded["BASE_LR"]) == ((0.01, 0.2) if share == "10pct" else (0.02, 5.0))


def test_a_batch_of_one_image_is_refused(images, tmp_path):
    with pytest.raises(UserError, match=r"FINETUNE.IMS_PER_BATCH is 1; it must be at least 2 for 1 process"):
        finetune.main(_config(images, tmp_path, "FINETUNE.IMS_PER_BATCH", "1"), "random")


def test_a_run_that_diverges_is_one_line(images, tmp_path):
    with pytest.raises(UserError, match=r"not finite in epoch 0; lower FINETUNE.BASE_LR or BACKBONE_LR"):
        finetune.main(_config(images, tmp_path, "FINETUNE.BASE_LR", "1e38"), "random")


@pytest.mark.parametrize("changed", [("DATA.PROBE_LABELS", "50%"), ("LINEAR.ENCODER", "key")])
def test_another_share_or_encoder_is_another_run(images, complete, changed):
    with pytest.raises(UserError, match="holds a different probe"):
        finetune.main(_config(images, complete, *changed), "random")
    assert finetune.main(_config(images, complete, "LINEAR.BASE_LR", "1"), "random")["stage"] == "finetune"


def _on_two_ranks(images, folder) -> None:
    cfg = _config(images, folder / "run", "FINETUNE.IMS_PER_BATCH", "15", "FINETUNE.EPOCHS", "1")
    ends, real = [], heads.Heads.score

    def score(self, *features):
        ends.append({name: value.clone() for name, value in self.state()["state_dict"].items()})
        return real(self, *features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads.Heads, "score", score)
        finetune.main(cfg, "random")
    torch.save(ends[-1], folder / f"end{distributed.rank()}.pth")


def test_two_ranks_end_with_one_network(images, tmp_path):
    """With 8 and 7 images each; their running statistics are averaged."""
    run_ranks(_on_two_ranks, 2, images, tmp_path)
    ends = [torch.load(tmp_path / f"end{rank}.pth") for rank in (0, 1)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
