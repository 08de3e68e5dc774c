import math
import shutil

import pytest
import torch
from torch.nn import functional as F

from pretrain import train
from pretrain.common import distributed
from pretrain.common.interrupt import StopRequest
from pretrain.common.ranks.agreement import AgreedStop
from pretrain.probe import features, knn
from pretrain.probe.features import Features
from pretrain.probe.knn import classify, vote
from tests.errors import refused
from tests.pretrain.probe.configs import probe_config, stop_in_batch
from tests.pretrain.ranks import call_on_ranks
from tests.pretrain.runs import assert_same_end, lines, load_newest, stopped

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

NEVER = AgreedStop(StopRequest(), torch.device("cpu"))


def _config(images, output, *more):
    """Build the config of a pretraining with two epochs of three steps, and kNN after each."""
    words = (
        "METHOD.NAME simclr MODEL.HEAD_HIDDEN_DIMS [16] MODEL.EMBEDDING_DIM 8 SOLVER.IMS_PER_BATCH 16 SOLVER.EPOCHS 2 "
        "SOLVER.LOG_PERIOD 1 PROBE.KNN_PERIOD 1"
    )
    return probe_config(images, output, *words.split(), *more)


def test_vote_equals_the_sum_over_neighbors():
    """The vote equals loops written from Wu et al. 2018, Sec. 3.4."""
    torch.manual_seed(0)
    similarity = torch.rand(5, 7).double() * 2 - 1
    labels = torch.randint(0, 4, (5, 7))
    votes = vote(similarity, labels, 0.07, 4)
    for q in range(5):
        naive = [0.0] * 4
        for label, value in zip(labels[q].tolist(), similarity[q].tolist(), strict=True):
            naive[label] += math.exp(value / 0.07)
        assert (votes[q] / votes[q].sum()).tolist() == pytest.approx([n / sum(naive) for n in naive], rel=1e-6)


def test_classify_counts_top1_and_normalizes_the_features_in_place():
    bank = Features(torch.eye(6) * 2, torch.arange(6), 6)
    queries = Features(torch.eye(6) * 3, torch.tensor([0, 1, 2, 3, 4, 0]), 6)
    for k in (1, 200):
        scores = classify(bank, queries, NEVER, k=k, temperature=0.01)
        assert scores["top1"] == pytest.approx(100 * 5 / 6) and scores["train_images"] == 6
    assert torch.equal(bank.features_NF, torch.eye(6))


def test_every_usual_k_is_scored_in_one_pass():
    torch.manual_seed(0)
    bank = Features(torch.randn(150, 4), torch.randint(0, 3, (150,)), 3)
    queries = Features(torch.randn(40, 4), torch.randint(0, 3, (40,)), 3)
    got = classify(bank, queries, NEVER, k=5, temperature=0.07, chunk=16)
    assert [key for key in got if key.startswith("top1_k")] == ["top1_k10", "top1_k20", "top1_k100"]
    for k in (10, 20, 100):
        assert got[f"top1_k{k}"] == classify(bank, queries, NEVER, k=k, temperature=0.07)["top1"]


def _draw_with_ties() -> tuple[Features, Features]:
    """Draw features with few directions and exact similarities, so that most neighbors are equally near."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [1, 1, -1, -1], [-1, 0, 0, 0]]).float()
    draws = [torch.randint(0, 5, (count,), generator=generator) for count in (101, 40)]
    labels = [torch.randint(0, 4, (count,), generator=generator) for count in (101, 40)]
    train, val = (Features(directions[d], label, 4) for d, label in zip(draws, labels, strict=True))
    return train, val


def test_equally_similar_images_vote_in_the_order_of_the_data():
    train, val = _draw_with_ties()
    similarity = F.normalize(val.features_NF, dim=1) @ F.normalize(train.features_NF, dim=1).T
    for k in (1, 7, 50, 101):
        nearest, labels = knn.find_nearest(similarity, train.labels_N, k)
        for q, row in enumerate(similarity.tolist()):
            expected_order = sorted(range(101), key=lambda t, row=row: (-row[t], t))[:k]
            assert nearest[q].tolist() == [row[t] for t in expected_order]
            assert labels[q].tolist() == train.labels_N[expected_order].tolist()


def _classify_a_part(expected_order: dict[int, dict[str, float]]) -> None:
    train, val = _draw_with_ties()
    uneven = slice(101) if distributed.rank() else slice(0)
    for part in (distributed.rank_slice(101), uneven):
        for k, scores in expected_order.items():
            ours = Features(train.features_NF[part].clone(), train.labels_N[part], 4)
            assert classify(ours, val, NEVER, k=k, temperature=0.5, chunk=16) == scores
            assert classify(ours, val, NEVER, k=k, temperature=0.5) == scores


def test_ranks_that_share_the_images_find_the_neighbors_of_one_process():
    """This includes ranks with fewer images than neighbors, and ranks without images."""
    train, val = _draw_with_ties()
    expected_order = {}
    for k in (1, 7, 60, 200):
        ours = Features(train.features_NF.clone(), train.labels_N, 4)
        expected_order[k] = classify(ours, val, NEVER, k=k, temperature=0.5)
    assert len({scores["top1"] for scores in expected_order.values()}) > 1 and expected_order[7]["train_images"] == 101
    call_on_ranks(_classify_a_part, 2, expected_order)


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """The run folder of an uninterrupted pretraining."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train.main(_config(images, folder))
    return folder


# Of the kNN after the first epoch, of RankMe after it, and of the kNN at the end: kNN reads 16 batches, RankMe 12.
@pytest.mark.parametrize(("batch", "step"), [(2, 3), (18, 3), (30, 6)])
def test_a_stop_during_pretrainings_knn_loses_nothing(images, whole, tmp_path, monkeypatch, batch, step):
    with monkeypatch.context() as patch:
        seen, context = stop_in_batch(patch, batch)
        stopped(lambda: train.main(_config(images, tmp_path / "run"), context=context), "asked")
    assert len(seen) == batch and load_newest(tmp_path / "run")[1]["step"] == step
    train.main(_config(images, tmp_path / "run"))
    assert_same_end(whole, tmp_path / "run")
    scores = [lines(folder, "knn_top1") for folder in (whole, tmp_path / "run")]
    assert scores[0] == scores[1] and len(scores[0]) == 2


def _one_rank_is_asked(images, output) -> None:
    cfg = _config(images, output, "DATA.PROBE_TRAIN", f"folder:{images}")
    with pytest.MonkeyPatch.context() as patch:
        seen, context = stop_in_batch(patch, (-1, 2)[distributed.rank()])
        reason = ("a signal to another process of this run", "asked")[distributed.rank()]
        stopped(lambda: knn.main(cfg, "random", context=context), reason)
        assert len(seen) == 3  # of six per rank; all know one batch later
    results = knn.main(_config(images, output), "random")
    assert results["metrics"]["top1"] > 90 and results["source"]["source"] == "random"
    assert {"k": 5, "image_size": 16, "train_images": 48, "val_images": 16}.items() <= results["protocol"].items()
    assert (results["metrics"]["train_images"], results["metrics"]["val_images"]) == (48, 16)


def test_every_rank_stops_in_the_same_batch(images, tmp_path):
    call_on_ranks(_one_rank_is_asked, 2, images, tmp_path)


@pytest.mark.parametrize(
    ("words", "k", "warned"), [((), 5, 0), (("PROBE.KNN_K", "200"), 48, 1), (("PROBE.KNN_MAX_IMAGES", "4"), 4, 1)]
)
def test_log_and_results_name_the_neighbors_that_voted(images, tmp_path, words, k, warned):
    results = knn.main(_config(images, tmp_path, *words), "random")
    log = (tmp_path / "log.txt").read_text()
    assert results["protocol"]["k"] == k and f"(k {k}, " in log and log.count("all training images vote") == warned


def test_pretrainings_knn_out_of_memory_names_keys_with_which_the_run_ends(images, whole, tmp_path, monkeypatch):
    def extract(encoder, data, cfg, *args, **kwargs):
        if not cfg.PROBE.KNN_MAX_IMAGES:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return features.extract(encoder, data, cfg, *args, **kwargs)

    monkeypatch.setattr(knn, "extract", extract)
    words = ("PROBE.KNN_PERIOD", "0")
    refused(lambda: train.main(_config(images, tmp_path, *words)), "PROBE.KNN_MAX_IMAGES", "PROBE.IMAGE_SIZE")
    results = train.main(_config(images, tmp_path, *words, "PROBE.KNN_MAX_IMAGES", "8", "PROBE.IMAGE_SIZE", "8"))
    assert_same_end(whole, tmp_path)
    assert results["metrics"]["knn_train_images"] == 8 and results["knn_protocol"]["k"] == 5


@pytest.mark.parametrize("key", ["DATA.VAL", "DATA.PROBE_TRAIN"])
@pytest.mark.parametrize("value", ["folder:/nowhere", "folder:{images}/train/class0", "folder:{images}/train"])
def test_a_mistake_in_named_probe_data_ends_pretraining_before_its_first_step(images, tmp_path, key, value):
    """The data are missing, have no labels, or serve both to learn from and to be scored on."""
    path = value.format(images=images)
    words = (key, path, *(("DATA.VAL", f"folder:{images}/train") if key != "DATA.VAL" else ()))
    refused(lambda: train.main(_config(images, tmp_path / "run", *words)), path.removeprefix("folder:"))
    assert not lines(tmp_path / "run", "loss")


def test_one_class_alone_is_not_scored_and_not_supervised(images, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(images / split / "class0", tmp_path / "photos" / split / "only")
    (tmp_path / "photos" / "train" / "empty").mkdir()
    cfg = _config(images, tmp_path / "run", "DATA.TRAIN", f"folder:{tmp_path}/photos")
    with pytest.raises(knn.MissingLabels, match="photos has only one class"):
        knn.load_probe_data(cfg)
    words = ("DATA.TRAIN", f"folder:{tmp_path}/photos", "METHOD.NAME", "supcon", "METHOD.LABELS", "class")
    refused(lambda: train.main(_config(images, tmp_path / "run", *words)), "METHOD.LABELS", "photos", "1 class")


def test_data_that_cannot_be_probed_can_be_pretrained_on(images, tmp_path):
    """For unlabeled photos in train/, the message says that labels are missing, not a val split."""
    shutil.copytree(images / "train/class0", tmp_path / "photos/train")
    data = ("DATA.TRAIN", f"folder:{tmp_path}/photos")
    out = tmp_path / "run"
    results = train.main(_config(images, out, *data, "SOLVER.EPOCHS", "1", "SOLVER.MAX_STEPS", "1"))
    assert results["metrics"].keys() == {"rankme", "rankme_images"} and not lines(out, "knn_top1")
    log = (out / "log.txt").read_text()
    assert log.count("kNN") == 1 and f"folder:{tmp_path}/photos has no labels to probe with" in log


def test_validation_images_that_are_training_images_are_named(images, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(images, data)
    name = min(path.name for path in (data / "train/class0").iterdir())
    shutil.copy(data / "train/class0" / name, data / "val/class0/copy.png")
    knn.main(_config(data, tmp_path / "run"), "random")
    (line,) = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "are training images" in line]
    assert ": 1 of 17 validation images" in line and f"val/class0/copy.png, which equals {data}/train" in line


def test_too_many_images_are_not_compared(images, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.probe.data._MOST_COMPARED", 63)
    monkeypatch.setattr("pretrain.probe.data.read_sizes", lambda _: pytest.fail("a file is read"))
    knn.main(_config(images, tmp_path / "run"), "random")
    assert "64 images are too many to look for" in (tmp_path / "run/log.txt").read_text()
