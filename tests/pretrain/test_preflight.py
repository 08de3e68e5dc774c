"""Checked before a device is used: a batch divides evenly among processes and is no larger than the data set."""

import tarfile
from pathlib import Path

import pytest

from pretrain import preflight
from pretrain.config import load_config
from pretrain.data import count
from pretrain.model.batch_split import count_bn_groups, micro_batches
from tests.errors import refused
from tests.pretrain.images import write_folder
from tools import launch


@pytest.mark.parametrize(
    ("words", "processes", "names"),
    [
        ("SOLVER.IMS_PER_BATCH 48", 1, ()),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 4, ()),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 3", 4, ("BN_GROUPS is 3", "4 processes")),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 99", 1, ("IMS_PER_BATCH is 8", "BN_GROUPS 99", "set 99")),
        ("SOLVER.IMS_PER_BATCH 256", 6, ("IMS_PER_BATCH is 256", "6 processes", "252 or 258")),
        ("SOLVER.IMS_PER_BATCH 7", 1, ("IMS_PER_BATCH 7", "6 or 8")),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 2 SOLVER.ACCUMULATE 4", 1, ("1 process x SOLVER.ACCUMULATE 4",)),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 1 SOLVER.ACCUMULATE 2", 2, ("BN_GROUPS is 1", "ACCUMULATE 2")),
        ("SOLVER.IMS_PER_BATCH 3", 4, ("IMS_PER_BATCH is 3", "4 processes")),
        ("SOLVER.IMS_PER_BATCH 8 SOLVER.ACCUMULATE 8", 2, ("2 processes x SOLVER.ACCUMULATE 8",)),
    ],
)
def test_a_batch_that_cannot_be_divided(words: str, processes: int, names: tuple[str, ...]) -> None:
    cfg = load_config(None, words.split())
    if names:
        refused(lambda: preflight.check_divisible(cfg, processes), *names)
    else:
        preflight.check_divisible(cfg, processes)


def test_a_linear_probes_batch_is_a_multiple_of_the_processes() -> None:
    cfg = load_config(None, ["LINEAR.IMS_PER_BATCH", "256"])
    preflight.check_probe_divisible(cfg, 8)
    refused(lambda: preflight.check_probe_divisible(cfg, 3), "LINEAR.IMS_PER_BATCH is 256", "255 or 258")


def test_a_single_process_has_several_bn_groups_in_place_of_processes():
    def groups(batch_size: int, accumulate: int = 1) -> int:
        return count_bn_groups(batch_size, 0, processes=1, accumulate=accumulate, has_keys=True)

    assert [groups(size) for size in (1, 2, 3, 4, 16, 100, 128, 256, 25)] == [1, 1, 1, 2, 2, 4, 4, 8, 5]
    assert [groups(256, accumulate) for accumulate in (2, 4, 16)] == [8, 8, 16]  # never fewer with micro-batches
    assert groups(320, 5) == 10


def test_micro_batches_are_equal():
    assert list(micro_batches(6, 3)) == [(slice(0, 2), False), (slice(2, 4), False), (slice(4, 6), True)]


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Six training images and three others, as a folder and as a tar."""
    names = [f"{split}/a/{i}.png" for split, number in (("train", 6), ("val", 3)) for i in range(number)]
    folder = write_folder(tmp_path / "few", names, height=8, width=8)
    with tarfile.open(tmp_path / "few.tar", "w") as archive:
        archive.add(folder / "train", "images")
    return folder


@pytest.mark.parametrize("name", ["folder:{}", "folder:{}/train", "tar:{}.tar"])
@pytest.mark.parametrize("key", ["SOLVER.IMS_PER_BATCH", "LINEAR.IMS_PER_BATCH"])
def test_a_batch_larger_than_the_data_set_is_named_by_its_key(few: Path, name: str, key: str) -> None:
    train = name.format(few)
    preflight.check_batch_size(load_config(None, [key, "6"]), key, train)
    cfg = load_config(None, [key, "8"])
    refused(lambda: preflight.check_batch_size(cfg, key, train), f"{key} is 8", "6 images", "at most 6")


def test_a_probe_that_selects_its_learning_rate_learns_from_the_rest(few: Path) -> None:
    key = "LINEAR.IMS_PER_BATCH"
    cfg = load_config(None, [key, "6"])
    refused(lambda: preflight.check_batch_size(cfg, key, f"folder:{few}", holds_out=True), f"{key} is 6", "5")


def test_a_large_data_set_is_not_counted(few: Path) -> None:
    def count_images(name: str, enough: int = 99) -> int | None:
        return count.count_images(name, "", enough, many_files=8)

    assert (count_images(f"folder:{few}"), count_images(f"folder:{few}/train")) == (None, 6)
    assert (count_images(f"tar:{few}.tar"), count_images(f"tar:{few}.tar", 6)) == (6, None)
    assert count_images("imagenet") is None
    assert count_images(f"['folder:{few}/train', 'folder:{few}']") is None
    several = f"['folder:{few}/train', 'folder:{few}/val', 'tar:{few}.tar']"
    assert (count_images(several), count_images(several, 6)) == (15, None)


def test_a_dry_run_finds_a_batch_that_is_too_large(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--cluster", "local", "--gpus", "0"]  # whatever this machine has
    data = ["DATA.TRAIN", f"folder:{few}", "OUTPUT_DIR", f"{few}_run"]
    words = ["pretrain", "--method", "simclr", "--dry-run", *here, *data]
    assert launch.main([*words, "SOLVER.IMS_PER_BATCH", "64", "MODEL.BN_GROUPS", "1"]) == 2
    assert "SOLVER.IMS_PER_BATCH is 64, but the data set has 6 images" in capsys.readouterr().out
    assert launch.main([*words, "SOLVER.IMS_PER_BATCH", "4", "MODEL.BN_GROUPS", "1"]) == 0
