"""One step of learning: the same numbers on one process and on two, where BN's groups are the same."""

from pathlib import Path

import pytest
import torch

from pretrain import distributed
from pretrain.common.copies import AsyncHostCopy
from pretrain.common.errors import UserError
from pretrain.config import load_config
from pretrain.learner import Learner, local_bn_groups
from pretrain.loader import Batch
from pretrain.siamese import encode
from tests.pretrain.ranks import run_ranks

N, V = 8, 4


def _config(method: str, *more: str):
    keys = str(V - 1) if method in ("jcl", "multikey") else "1"
    return load_config(None, [
        "METHOD.NAME", method, "METHOD.NUM_KEYS", keys, "MODEL.ARCH", "resnet18", "MODEL.STEM", "cifar",
        "MODEL.HEAD_HIDDEN_DIMS", "[32]", "MODEL.EMBEDDING_DIM", "16", "MODEL.QUEUE_SIZE", "20",
        "SOLVER.IMS_PER_BATCH", str(N), "SOLVER.BASE_LR", "0.1", "SOLVER.EPOCHS", "2", "MODEL.BN_GROUPS", "2",
        "MODEL.EMA_MOMENTUM", "0.9", "DEVICE", "cpu", *more,
    ])  # fmt: skip


def _two_steps(method: str, *more: str) -> dict[str, torch.Tensor]:
    """Loss of each step, gradients of the last and all state after two steps; the mean over ranks where it is local."""
    cfg = _config(method, *more)
    learner = Learner(cfg, torch.device("cpu"), lambda _: None)
    total = cfg.SOLVER.IMS_PER_BATCH
    start, stop = distributed.slice_bounds(total, distributed.rank(), distributed.world_size())
    views = 1 + cfg.METHOD.NUM_KEYS
    out = {}
    for step in range(2):
        images = torch.randint(0, 256, (views, total, 3, 16, 16), generator=torch.Generator().manual_seed(step))
        index = torch.arange(total)
        batch = Batch(images[:, start:stop].to(torch.uint8), index[start:stop], index[start:stop] % 3, None)
        objective = learner.step(batch, step, step / 4, 0, 0.1, None)
        share = (stop - start) * distributed.world_size() / total
        out[f"loss{step}"] = distributed.mean_(objective.loss.detach() * share)
        if step == 0:
            out |= {f"grad.{name}": p.grad.clone() for name, p in learner.encoder.named_parameters()}
    return out | learner.siamese.moco_state_dict()


def _on_ranks(path: str, method: str, *more: str) -> None:
    got = _two_steps(method, *more)
    if distributed.is_main():
        torch.save(got, path)


def _assert_ranks_equal_one(path: Path, ranks: int, method: str, *more: str) -> None:
    run_ranks(_on_ranks, ranks, str(path), method, *more)
    one, many = _two_steps(method, *more), torch.load(path)
    assert one.keys() == many.keys()
    assert (one["loss0"] - many["loss0"]).abs() < 1e-5
    largest = max(value.abs().max() for name, value in one.items() if name.startswith("grad."))
    for name, value in one.items():
        difference = (value - many[name]).abs().max()
        if name.startswith("grad."):
            assert difference < 1e-5 * largest, name
        elif name.endswith(("queue_ptr", "num_batches_tracked")):
            assert difference == 0, name
        else:  # after two steps at a high learning rate rounding has grown
            assert difference < 1e-2 * value.abs().max().clamp(min=1), name


@pytest.mark.parametrize("method", ["mocov2", "multikey", "jcl", "simclr", "supcon"])
def test_two_processes_equal_one_with_the_same_bn_groups(method, tmp_path):
    _assert_ranks_equal_one(tmp_path / "ranks.pth", 2, method)


@pytest.mark.parametrize(("method", "ranks", "groups", "images"), [("jcl", 3, 6, 16), ("simclr", 2, 2, 9)])
def test_bn_groups_of_unequal_size_are_the_same_on_any_number_of_processes(method, ranks, groups, images, tmp_path):
    words = ("MODEL.BN_GROUPS", str(groups), "SOLVER.IMS_PER_BATCH", str(images))
    _assert_ranks_equal_one(tmp_path / "ranks.pth", ranks, method, *words)


def test_single_process_splits_bn_and_says_so():
    said = []
    sizes = local_bn_groups(_config("jcl", "MODEL.BN_GROUPS", "0", "SOLVER.IMS_PER_BATCH", "256"), said.append)
    assert sizes == [32] * 8
    assert "split BN with 8 groups stands in for ShuffleBN" in said[0]
    assert local_bn_groups(_config("jcl", "MODEL.BN_GROUPS", "0", "SOLVER.IMS_PER_BATCH", "1")) == [1]
    with pytest.raises(UserError, match="BN_GROUPS is 99"):
        local_bn_groups(_config("jcl", "MODEL.BN_GROUPS", "99"))


@pytest.mark.parametrize("ranks", [1, 4])
def test_statistics_that_query_and_keys_share_are_told_to_leak(ranks, monkeypatch):
    said = []
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    local_bn_groups(_config("mocov2", "MODEL.BN_GROUPS", "1"), said.append)
    assert len(said) == 1 and "share BN statistics, which can leak the answer" in said[0]
    local_bn_groups(_config("simclr", "MODEL.BN_GROUPS", "1"), said.append)  # nothing to leak within the batch
    assert len(said) == 1


def test_batch_norm_of_one_image_is_told():
    with pytest.raises(UserError, match=r"statistics of one image \(1 here\): raise SOLVER.IMS_PER_BATCH"):
        encode(torch.nn.BatchNorm1d(4), torch.ones(1, 4))


def test_other_bn_groups_than_the_checkpoints_are_told():
    said = []
    state = Learner(_config("jcl"), torch.device("cpu"), said.append).state(_config("jcl"), 3, 9)
    other = Learner(_config("jcl", "MODEL.BN_GROUPS", "4"), torch.device("cpu"), said.append)
    assert other.load(state) == 3
    assert "batch-norm statistics over 2 parts of the batch, now 4" in said[-1]


def test_keys_follow_the_queries_by_the_moving_average():
    learner = Learner(_config("mocov2"), torch.device("cpu"), lambda _: None)
    with torch.no_grad():
        for p in learner.encoder.parameters():
            p.add_(1.0)
    before = [p.clone() for p in learner.siamese.encoder_k.parameters()]
    learner.siamese.update_keys(0.9)
    for old, q, k in zip(before, learner.encoder.parameters(), learner.siamese.encoder_k.parameters(), strict=True):
        torch.testing.assert_close(k, 0.9 * old + 0.1 * q)
        assert not k.requires_grad


def test_shuffling_hides_the_batch_statistics():
    """The group of a query and the group of its key differ for some images, else BN leaks the answer."""
    learner = Learner(_config("mocov2"), torch.device("cpu"), lambda _: None)
    seen = []
    learner.siamese.encoder_k.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0, 0, 0].clone()))
    images = torch.arange(N, dtype=torch.uint8).view(1, N, 1, 1, 1).expand(1, N, 3, 16, 16) * 10
    keys = learner.siamese.encode_keys(images, N, torch.Generator().manual_seed(3), lambda x: x.float())
    order = (seen[0] / 10).long()
    assert sorted(order.tolist()) == list(range(N)) and order.tolist() != list(range(N))
    groups_of_keys = {i: position * 2 // N for position, i in enumerate(order.tolist())}
    assert any(groups_of_keys[i] != i * 2 // N for i in range(N))
    assert keys.shape == (1, N, 16)


def test_the_state_has_mocos_names():
    names = set(Learner(_config("mocov2"), torch.device("cpu"), lambda _: None).siamese.moco_state_dict())
    assert {"module.encoder_q.conv1.weight", "module.encoder_k.fc.2.bias", "module.queue", "module.queue_ptr"} <= names
    assert all(n.startswith(("module.encoder_q.", "module.encoder_k.", "module.queue")) for n in names)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_takes_a_step_near_full_precision(amp):
    def loss(*more: str) -> float:
        learner = Learner(_config("jcl", *more), torch.device("cpu"), lambda _: None)
        images = torch.randint(0, 256, (V, N, 3, 16, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        batch = Batch(images, torch.arange(N), torch.zeros(N, dtype=torch.long), None)
        return float(learner.step(batch, 0, 0.0, 0, 0.1, None).loss.detach())

    full, mixed = loss(), loss("SOLVER.AMP", amp, "SOLVER.CHANNELS_LAST", "True")
    assert mixed == pytest.approx(full, rel=0.05) and mixed != full


def test_an_image_without_a_label_is_alike_to_its_own_views_only():
    def loss(*more: str) -> float:
        learner = Learner(_config("supcon", *more), torch.device("cpu"), lambda _: None)
        images = torch.randint(0, 256, (2, N, 3, 16, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        batch = Batch(images, torch.arange(N), torch.full((N,), -1), None)
        return float(learner.step(batch, 0, 0.0, 0, 0.1, None).loss.detach())

    assert loss("METHOD.LABELS", "class") == loss("METHOD.LABELS", "index")


def test_the_wish_to_stop_is_read_without_waiting_for_the_last_step(monkeypatch):
    learner = Learner(_config("mocov2"), torch.device("cpu"), lambda _: None)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    learner._control, learner._suspect = AsyncHostCopy(torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])), (0, 0.1, None, None)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncHostCopy, "read", lambda self: pytest.fail("waited for the device"))
        assert learner.stop_agreed() == ""
    learner.check_finite()  # the next step's look at this one
    assert learner.stop_agreed() == "another rank was asked to stop"


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["MODEL.BN_GROUPS", "1"], "SyncBN, which torch has on GPUs only"),
        (["MODEL.BN_GROUPS", "3"], "BN_GROUPS is 3; it must be a multiple of 2 processes"),
        (["SOLVER.IMS_PER_BATCH", "1"], "fewer images than the 2 processes"),
    ],
)
def test_what_two_processes_cannot_do_is_refused(overrides, says, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(UserError, match=says):
        Learner(_config("simclr", *overrides), torch.device("cpu"), lambda _: None)
