"""The ranks of a run must agree on its inputs; if they do not, the error says where they differ."""

import time
from pathlib import Path

import pytest
import torch

from pretrain import train
from pretrain.common import distributed, interrupt
from pretrain.common.distributed import gather_objects
from pretrain.common.weights import checkpoint
from tests.errors import refused
from tests.pretrain.ranks import run_ranks
from tests.pretrain.runs import assert_same_end, lines, run

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


STEPS = 8  # of which the first epoch has six


def _life_of_a_run(images: Path, output: Path) -> None:
    real_save = checkpoint.save
    real_read = checkpoint.read
    output.mkdir(exist_ok=True)
    run_folder = output
    if not distributed.is_main():  # the other machine has the shared folder under another path
        run_folder = output.with_name("elsewhere")
        run_folder.symlink_to(output, target_is_directory=True)
    words = ("SOLVER.MAX_STEPS", str(STEPS))
    run(images, output.with_name("whole"), *words)

    with pytest.MonkeyPatch.context() as patch:  # rank 1 is asked to stop, and waits for rank 0, which writes slowly

        def slow_save(*args) -> None:
            time.sleep(1)
            real_save(*args)

        patch.setattr(interrupt, "stop_requested", lambda: "" if distributed.is_main() else "preempted")
        patch.setattr(checkpoint, "save", slow_save)
        with pytest.raises(interrupt.Stopped):
            run(images, run_folder, *words)
        names = [path.name for path in checkpoint.list_checkpoints(output)]
        assert names == ["checkpoint_00000002.pth"]  # before any rank leaves

    with pytest.MonkeyPatch.context() as patch:  # its own disk, where the file is missing

        def missing(path: Path) -> dict:
            return real_read(path if distributed.is_main() else path.with_name("other.pth"))

        patch.setattr(checkpoint, "read", missing)
        refused(lambda: run(images, run_folder, *words), "rank 1 of 2", "no checkpoint at", "same files?")

    with pytest.MonkeyPatch.context() as patch:  # ... or contains the weights of another run

        def other(path: Path) -> dict:
            state = real_read(path)
            if not distributed.is_main():
                state["state_dict"]["module.encoder_k.conv1.weight"] += 1e-3
            return state

        patch.setattr(checkpoint, "read", other)
        text = refused(lambda: run(images, run_folder, *words), "weights", "differs between ranks")
        assert len(set(gather_objects(text))) == 1

    results = run(images, run_folder, *words)
    assert results["steps"] == STEPS and gather_objects(results) == [results] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_train", lambda *_: pytest.fail("complete"))
        assert run(images, run_folder, *words) == results


def test_ranks_agree_from_the_stop_to_the_end_which_is_an_uninterrupted_runs(images, tmp_path):
    run_ranks(_life_of_a_run, 2, images, tmp_path / "run")
    assert_same_end(tmp_path / "whole", tmp_path / "run")


def _one_rank_diverges(images: Path, output: Path) -> None:
    real_step = train.TrainingMonitor.step
    rank = distributed.rank()
    seen: list[str] = []
    losses: list[tuple[float, int]] = []

    def watch(self, loss, step, lr, index_n):
        losses.append((loss.item(), len(index_n)))
        if rank == 1 and step == 2:
            loss = loss * torch.nan
            seen[:] = [self._image_name(i) for i in index_n.tolist()]
        real_step(self, loss, step, lr, index_n)

    train.TrainingMonitor.step = watch
    text = refused(lambda: run(images, output, "SOLVER.IMS_PER_BATCH", "4"), "step 2 on rank 1", "rate ")
    assert ", ".join(gather_objects(seen)[1]) in text
    (first, of_first), (second, of_second) = (seen[1] for seen in gather_objects(losses))
    assert (of_first, of_second) == (2, 2) and abs(first - second) > 0.01
    logged = lines(output, "loss")[1]
    assert logged["loss"] == pytest.approx((first + second) / 2, abs=1e-5)


def test_ranks_log_the_means_of_all_images_and_the_rank_that_diverged_names_its_own(images, tmp_path):
    run_ranks(_one_rank_diverges, 2, images, tmp_path / "run")
