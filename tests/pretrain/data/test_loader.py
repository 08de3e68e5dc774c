"""The loader's batches depend only on seed, epoch and step; corrupt images are replaced or end the run."""

import dataclasses
import logging
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common import distributed, images
from pretrain.common.command_line import run_command_line
from pretrain.common.errors import UserError
from pretrain.common.run import workers
from pretrain.data import augmentations, loader, views
from pretrain.data.datasets import ImageData, load
from pretrain.data.loader import Batch, Loader, load_eval_batches
from pretrain.data.sources import Array
from tests.errors import refused
from tests.pretrain import ranks
from tests.pretrain.data.test_folders import labels
from tests.pretrain.images import picture, write_folder

IMAGES, BATCH = 23, 5
AUGMENTATIONS = [augmentations.AUGMENTATIONS["moco_v2"], augmentations.AUGMENTATIONS["autoaugment"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images"), [f"{i % 3}/{i:02d}.png" for i in range(IMAGES)])


@pytest.fixture(scope="module")
def data(folder: Path) -> ImageData:
    return load(f"folder:{folder}", "train")


def make(data: ImageData, num_workers: int = 0, seed: int = 7, batch_size: int = BATCH, **more) -> Loader:
    return Loader(data, AUGMENTATIONS, 16, batch_size=batch_size, seed=seed, num_workers=num_workers, **more)


def epoch(loader: Loader, number: int, start: int = 0) -> Iterator[Batch]:
    """Return the batches of one epoch, from step ``start``."""
    first = number * len(loader)
    return (batch for _, batch in loader.batches(first + start, first + len(loader)))


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))


def test_an_epoch(data: ImageData):
    loader = make(data)
    batches = list(epoch(loader, 0))
    assert len(batches) == len(loader) == IMAGES // BATCH
    assert batches[0].views_VnCHW.shape == (2, BATCH, 3, 16, 16) and batches[0].views_VnCHW.dtype == torch.uint8
    index = torch.cat([b.index_n for b in batches])
    assert len(index.unique()) == len(index) == 20
    assert torch.cat([b.label_n for b in batches]).tolist() == [labels(data)[i] for i in index]


def test_each_view_is_of_its_image_and_recipe(data: ImageData):
    batch = next(epoch(make(data), 3))
    unchanged = [augmentations.AUGMENTATIONS["none"]]
    plain = next(epoch(Loader(data, unchanged, 16, batch_size=BATCH, seed=7, num_workers=0), 3))
    assert torch.equal(plain.index_n, batch.index_n)  # the order does not depend on the augmentations
    for n, index in enumerate(plain.index_n.tolist()):
        expected = views.make_center_view(data.read(index), 16, 16)
        np.testing.assert_array_equal(plain.views_VnCHW[0, n].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("form", ["folder", "tar", "subset", "array"])
def test_reduced_decoding_reads_jpegs_alone_at_a_smaller_size(tmp_path: Path, monkeypatch, form: str):
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(BATCH):
        Image.fromarray(picture(seed, 150, 200)).save(folder / f"{seed}.jpg", quality=95)
    data = load(f"folder:{folder}", "train")
    if form == "array":  # a source that does not know of it
        data = dataclasses.replace(data, source=Array({"photos": np.stack([data.read(i) for i in range(BATCH)])}))
    if form == "subset":
        data = data.subset(np.arange(BATCH)[::-1])
    if form == "tar":
        subprocess.run(["tar", "-cf", tmp_path / "a.tar", "-C", tmp_path, "photos"], check=True)
        data = load(f"tar:{tmp_path}/a.tar", "train")
    full = next(epoch(make(data), 0)).views_VnCHW
    sizes: list[int] = []
    monkeypatch.setattr(loader, "make_views", lambda image, *a: sizes.append(len(image)) or views.make_views(image, *a))
    reduced = next(epoch(make(data, reduced_decoding=True), 0)).views_VnCHW
    assert sizes == BATCH * [150 if form == "array" else 38]  # crops have 0.39 x 43 pixels of 16
    is_equal = torch.equal(full, reduced)
    assert is_equal == (form == "array")
    assert (full[0].float() - reduced[0].float()).abs().mean() < 15  # the same crops and colors


@pytest.mark.core
def test_workers_change_nothing_and_leave_torchs_stream_alone(data: ImageData):
    before = torch.get_rng_state()
    for (_, a), (_, b) in zip(make(data).batches(0, 8), make(data, num_workers=2).batches(0, 8), strict=True):
        assert same(a, b)
    assert torch.equal(before, torch.get_rng_state())


def test_batches_from_a_step_on_are_the_tail_of_all_batches(data: ImageData):
    whole = list(make(data).batches(0, 11))
    assert [step for step, _ in whole] == list(range(11))
    for start in (1, 4, 6, 11):  # 4 steps per epoch
        tail = list(make(data).batches(start, 11))
        assert len(tail) == 11 - start
        assert all(step == other and same(a, b) for (step, a), (other, b) in zip(whole[start:], tail, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_share_the_batch_of_one_process(data: ImageData, world_size: int):
    size = 2 * world_size
    parts = [epoch(make(data, batch_size=size, rank=r, world_size=world_size), 0) for r in range(world_size)]
    for whole, *shares in zip(epoch(make(data, batch_size=size), 0), *parts, strict=True):
        assert torch.equal(torch.cat([s.views_VnCHW for s in shares], dim=1), whole.views_VnCHW)
        assert torch.equal(torch.cat([s.index_n for s in shares]), whole.index_n)


def test_seed_and_epoch_change_order_and_views(data: ImageData):
    first = next(epoch(make(data), 0))
    for other in (next(epoch(make(data), 1)), next(epoch(make(data, seed=8), 0))):
        assert not torch.equal(first.index_n, other.index_n)
    by_image, later = (
        {int(i): v for b in epoch(make(data), number) for i, v in zip(b.index_n, b.views_VnCHW[0], strict=True)}
        for number in (0, 1)
    )
    shared = by_image.keys() & later.keys()
    assert len(shared) > 10 and not any(torch.equal(by_image[i], later[i]) for i in shared)


def test_a_batch_larger_than_the_data(data: ImageData):
    refused(lambda: Loader(data, AUGMENTATIONS, 16, batch_size=24, seed=0), "SOLVER.IMS_PER_BATCH is 24", "at most 23")


@pytest.fixture
def damaged(tmp_path: Path) -> ImageData:
    write_folder(tmp_path, [f"{i:02d}.png" for i in range(10)])
    (tmp_path / "03.png").write_bytes(b"\0junk")
    return load(f"folder:{tmp_path}", "train")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_image_ends_the_epoch_in_one_line(damaged: ImageData, num_workers: int):
    """The error does not advise removing the image, because a started run refuses a changed data set."""
    remedy = "DATALOADER.ON_CORRUPT skip"
    refused(lambda: list(epoch(make(damaged, num_workers), 0)), damaged.image_name(3), "format", remedy)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skip_replaces_counts_and_names(damaged: ImageData, num_workers: int, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("pretrain.data.loader"), "warning", lines.append)
    loader = make(damaged, num_workers, on_corrupt="skip")
    batches = list(epoch(loader, 0))
    index = torch.cat([b.index_n for b in batches])
    assert sorted(index.tolist()) == [0, 1, 2, 4, 4, 5, 6, 7, 8, 9]
    twins = torch.cat([b.views_VnCHW[0] for b in batches])[index == 4]
    assert not torch.equal(twins[0], twins[1])  # the replacement uses the random stream of the corrupt image
    list(epoch(loader, 1))  # the same image again, which is named once
    assert len(lines) == 1 and damaged.image_name(3) in lines[0] and "format" in lines[0]


def test_skip_fails_above_1_in_1000(damaged: ImageData):
    Path(damaged.image_name(7)).write_bytes(b"\0junk")
    refused(lambda: list(epoch(make(damaged, on_corrupt="skip"), 0)), "2 of 10", "1 in 1,000", "format")
    for number in range(10):
        Path(damaged.image_name(number)).write_bytes(b"\0junk")
    refused(lambda: next(epoch(make(damaged, on_corrupt="skip"), 0)), "none", "10 images", damaged.image_name(0))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_eval_batches(data: ImageData, num_workers: int):
    batches = list(load_eval_batches(data, np.array([5, 1, 9, 9, 2]), 16, 20, 4, num_workers))
    assert [index.tolist() for _, index in batches] == [[5, 1, 9, 9], [2]]
    assert batches[1][0].shape == (1, 3, 16, 16)
    expected = views.make_center_view(data.read(2), 16, 20)
    np.testing.assert_array_equal(batches[1][0][0].permute(1, 2, 0).numpy(), expected)


def test_eval_batches_of_a_corrupt_image(damaged: ImageData):
    name = damaged.image_name(3)
    refused(lambda: list(load_eval_batches(damaged, np.arange(10), 16, 0, 4, 0)), name, "ON_CORRUPT skip")
    left = torch.cat([index for _, index in load_eval_batches(damaged, np.arange(10), 16, 0, 4, 0, on_corrupt="skip")])
    assert left.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def _load(folder: Path) -> None:
    loader = make(load(f"folder:{folder}", "train"), num_workers=2)
    run_command_line(lambda _: sum(1 for _ in loader.batches(0, 100)))


def test_a_process_that_fails_with_live_workers_ends(damaged: ImageData):
    """Workers ignore the job's signals, so the process itself must end them."""
    process = ranks.start(_load, Path(damaged.image_name(0)).parent)
    process.join(120)
    assert process.exitcode == 2


@pytest.mark.parametrize("method", ["fork", ranks.START_METHOD, pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_to_the_whole_job_leaves_workers_alive(data: ImageData, monkeypatch: pytest.MonkeyPatch, method: str):
    """This holds for every start method; from Python 3.14, the default is no longer fork."""
    monkeypatch.setenv("P2T_START_METHOD", method)
    loader = make(data, num_workers=2)
    batches = epoch(loader, 0)
    # Forked workers are born with signals blocked; the others inherit it from a server that an earlier test may have
    # started without, so that each of them has to be ready.
    first_batches = [next(batches) for _ in range(1 if method == "fork" else 2)]
    for worker in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):  # sent by another process than their parent
            subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)
    started = multiprocessing.active_children()
    remaining_batches = [next(batches) for _ in range(len(loader) - len(first_batches))]
    assert all(same(a, b) for a, b in zip(epoch(make(data), 0), first_batches + remaining_batches, strict=True))
    for worker in started:
        worker.terminate()  # by their parent
        worker.join(20)
    assert len(started) >= 2 and not any(worker.is_alive() for worker in started)


def test_runs_on_several_machines_do_not_fork_their_workers(data: ImageData, monkeypatch: pytest.MonkeyPatch):
    """Torchrun and our launcher set LOCAL_WORLD_SIZE; if it is missing, there is one machine."""
    monkeypatch.setattr(distributed, "world_size", lambda: 16)
    monkeypatch.delenv("P2T_START_METHOD", raising=False)
    for local, method in ((None, "fork"), ("16", "fork"), ("8", "forkserver")):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if local:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert workers.choose_start_method() == method
    monkeypatch.setenv("P2T_START_METHOD", "spawn")
    assert workers.choose_start_method() == "spawn"
    monkeypatch.setenv("P2T_START_METHOD", "thread")
    refused(lambda: next(epoch(make(data, 1), 0)), "P2T_START_METHOD", "thread", "forkserver")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_disk_is_never_skipped(data: ImageData, monkeypatch: pytest.MonkeyPatch, num_workers: int):
    monkeypatch.setattr(images, "read_file", mock.Mock(side_effect=UserError("cannot read image: Input/output error")))
    training = epoch(make(data, num_workers, on_corrupt="skip"), 0)
    refused(lambda: next(training), "Input/output error")
    evaluation = load_eval_batches(data, np.arange(IMAGES), 16, 0, 4, num_workers, on_corrupt="skip")
    refused(lambda: next(evaluation), "Input/output error")
