"""Ranks agree on their inputs; if one fails, the others end and report it. Another number of ranks may resume a run."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pretrain import train
from pretrain.common import distributed
from pretrain.common import images as image_files
from pretrain.common.distributed import gather_objects
from pretrain.common.ranks import process_group
from pretrain.common.run.state import RunContext, read_failure
from pretrain.common.weights import checkpoint
from pretrain.monitor import TrainingMonitor
from tests.errors import refused
from tests.pretrain.ranks import call_on_ranks, find_port, set_rank, start
from tests.pretrain.runs import assert_same_end, lines, run, stopped

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


STEPS = 8  # of which the first epoch has six


def _life_of_a_run(images: Path, output: Path) -> None:
    real_save = checkpoint.save
    real_read = checkpoint.read
    output.mkdir(exist_ok=True)
    run_folder = output
    if not distributed.is_first_rank():  # the other machine has the shared folder under another path
        run_folder = output.with_name("elsewhere")
        run_folder.symlink_to(output, target_is_directory=True)
    words = ("SOLVER.MAX_STEPS", str(STEPS))
    run(images, output.with_name("whole"), *words)

    with pytest.MonkeyPatch.context() as patch:  # rank 1 is asked to stop, and waits for rank 0, which writes slowly
        context = RunContext()
        if not distributed.is_first_rank():
            context.stop.make("preempted")
        patch.setattr(checkpoint, "save", lambda *args: time.sleep(1) or real_save(*args))
        stopped(lambda: run(images, run_folder, *words, context=context))
        names = [path.name for path in checkpoint.list_checkpoints(output)]
        assert names == ["checkpoint_00000002.pth"]  # before any rank leaves

    with pytest.MonkeyPatch.context() as patch:  # its own disk, where the file is missing

        def missing(path: Path) -> dict:
            return real_read(path if distributed.is_first_rank() else path.with_name("other.pth"))

        patch.setattr(checkpoint, "read", missing)
        refused(lambda: run(images, run_folder, *words), "rank 1 of 2", "no checkpoint at", "same files?")

    with pytest.MonkeyPatch.context() as patch:  # ... or contains the weights of another run

        def other(path: Path) -> dict:
            state = real_read(path)
            if not distributed.is_first_rank():
                state["state_dict"]["module.encoder_k.conv1.weight"] += 1e-3
            return state

        patch.setattr(checkpoint, "read", other)
        text = refused(lambda: run(images, run_folder, *words), "weights", "differs between ranks")
        assert len(set(gather_objects(text))) == 1

    results = run(images, run_folder, *words)
    assert results["steps"] == STEPS and gather_objects(results) == [results] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_step", lambda *_: pytest.fail("complete"))
        assert run(images, run_folder, *words) == results


def test_ranks_agree_from_the_stop_to_the_end_which_is_an_uninterrupted_runs(images, tmp_path):
    call_on_ranks(_life_of_a_run, 2, images, tmp_path / "run")
    assert_same_end(tmp_path / "whole", tmp_path / "run")


def _one_rank_diverges(images: Path, output: Path) -> None:
    real_step = train.TrainingMonitor.watch
    rank = distributed.rank()
    seen: list[str] = []
    losses: list[tuple[float, int]] = []

    def watch(self, loss, step, lr, index_n):
        losses.append((loss.item(), len(index_n)))
        if rank == 1 and step == 2:
            loss = loss * torch.nan
            seen[:] = [self._image_name(i) for i in index_n.tolist()]
        real_step(self, loss, step, lr, index_n)

    train.TrainingMonitor.watch = watch
    text = refused(lambda: run(images, output, "SOLVER.IMS_PER_BATCH", "4"), "step 2 on rank 1", "rate ")
    assert ", ".join(gather_objects(seen)[1]) in text
    (first, of_first), (second, of_second) = (seen[1] for seen in gather_objects(losses))
    assert (of_first, of_second) == (2, 2) and abs(first - second) > 0.01
    logged = lines(output, "loss")[1]
    assert logged["loss"] == pytest.approx((first + second) / 2, abs=1e-5)


def test_ranks_log_the_means_of_all_images_and_the_rank_that_diverged_names_its_own(images, tmp_path):
    call_on_ranks(_one_rank_diverges, 2, images, tmp_path / "run")


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raising": lambda: torch.zeros(2) @ torch.zeros(3),
    **dict.fromkeys(("full disk", "bad images", "other code", "another disk"), lambda: None),
}


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without interruption on two ranks; return the run folder."""
    folder = tmp_path_factory.mktemp("whole")
    call_on_ranks(run, 2, images, folder)
    return folder


def _rank(rank: int, port: int, images: Path, output: Path, fault: str) -> None:
    """Run one of two ranks, of which one meets the fault; write how it ended to ended.RANK."""
    set_rank(rank, 2, port)
    process_group.TIMEOUT_S = process_group.STEP_TIMEOUT_S = 8.0
    if fault == "other code" and rank == 1:
        process_group.compute_code_digest = lambda: "00000000"
    if fault == "another disk" and rank == 0:
        checkpoint.list_checkpoints = lambda folder: []
    if fault == "full disk" and rank == 0:
        checkpoint.torch.save = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if fault == "bad images" and rank == 1:
        image_files.read_file = lambda path, *more: b"no image"
    real = TrainingMonitor.watch

    def step(self: TrainingMonitor, loss: torch.Tensor, number: int, *more: Any) -> None:
        if rank == 1 and number == 5:
            FAULTS[fault]()
        real(self, loss, number, *more)

    TrainingMonitor.watch = step  # type: ignore[method-assign]
    ended = "complete"
    try:
        run(images, output / "run")
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    (output / f"ended.{rank}").write_text(ended)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_fails_and_the_others_say_so_in_time(images: Path, whole: Path, tmp_path: Path, fault: str):
    port = find_port()
    if fault == "another disk":
        (tmp_path / "run").mkdir()
        (tmp_path / "run/checkpoint_00000004.pth").touch()
    first = start(_rank, 0, port, images, tmp_path, fault)
    second = start(_rank, 1, port, images, tmp_path, fault)
    first.join(60)
    if fault == "stopped":
        second.kill()
    second.join(30)
    ended = {rank: path.read_text() for rank in range(2) if (path := tmp_path / f"ended.{rank}").exists()}
    if fault in ("other code", "another disk"):  # both ranks refuse to start, in the same words
        name = "digest of the code" if fault == "other code" else "contains a checkpoint"
        assert ended[0] == ended[1] and ended[0].startswith("UserError: ") and name in ended[0]
        assert not (tmp_path / "run/config.yaml").exists()
        return
    if fault == "full disk":  # only rank 0 writes the checkpoint; both name the cause
        assert ended[0] == ended[1] and "checkpoint_00000004.pth: No space left on device" in ended[0]
    else:
        assert ended[0].startswith("ProcessLost: another process of this run has ended") and "\n" not in ended[0]
    if fault in ("bad images", "raising"):
        cause = {"bad images": "cannot decode image ", "raising": "inconsistent tensor size"}[fault]
        failure = read_failure(tmp_path / "run")  # without the launcher, the stage records it
        assert cause in ended[1] and cause in failure["error"]
        assert (failure["rank"], failure["user_error"]) == (1, fault == "bad images")
    call_on_ranks(run, 2, images, tmp_path / "run")
    log = (tmp_path / "run/log.txt").read_text()
    assert "] device cpu, 2 processes, backend gloo\n" in log
    # The first two end before a checkpoint.
    assert fault in ("bad images", "full disk") or "resumed from checkpoint_00000004.pth at step 4 of 12" in log
    assert_same_end(whole, tmp_path / "run")


# In such a tiny network, changing the weights by 1e-7 changes the loss by 1e-2 after nine steps at a rate of 0.003.
GROUPS = ("MODEL.BN_GROUPS", "4", "SOLVER.IMS_PER_BATCH", "16", "SOLVER.BASE_LR", "0.0001", "SOLVER.EPOCHS", "3")


def _until(images: Path, output: Path, last: int) -> None:
    """Resume the run and stop one of its ranks after step ``last``."""
    real = TrainingMonitor.watch
    context = RunContext()

    def step(self: TrainingMonitor, loss: torch.Tensor, number: int, *more: Any) -> None:
        if distributed.rank() == 1 and number >= last - 1:  # the others stop with it, one step later
            context.stop.make("enough")
        real(self, loss, number, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingMonitor, "watch", step)
        stopped(lambda: run(images, output, *GROUPS, context=context))


def test_four_ranks_then_two_then_one_end_as_one_would(images: Path, tmp_path: Path):
    run(images, tmp_path / "one", *GROUPS)
    call_on_ranks(_until, 4, images, tmp_path / "run", 2)
    call_on_ranks(_until, 2, images, tmp_path / "run", 5)
    run(images, tmp_path / "run", *GROUPS)
    single = lines(tmp_path / "one", "loss")
    many = lines(tmp_path / "run", "loss")
    assert [line["iteration"] for line in many] == [line["iteration"] for line in single] == list(range(9))
    assert [line["loss"] for line in many] == pytest.approx([line["loss"] for line in single], rel=2e-3)
    a = checkpoint.read(tmp_path / "one" / checkpoint.FINAL)["optimizer"]["state"]
    b = checkpoint.read(tmp_path / "run" / checkpoint.FINAL)["optimizer"]["state"]
    for number, state in a.items():  # the sum of all gradients; other batches would give about 1.4
        expected = state["momentum_buffer"]
        actual = b[number]["momentum_buffer"]
        assert (actual - expected).norm() < 0.3 * expected.norm(), number
