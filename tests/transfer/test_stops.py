"""A request to stop ends the current step, precise BN or evaluation of either engine, and nothing is lost."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pretrain.common import images
from pretrain.common.interrupt import StopRequest
from pretrain.common.ranks import parent
from pretrain.common.run.state import RunContext
from tests.errors import refused
from tests.pretrain.runs import stopped
from tests.stops import stop_before_batch
from tests.transfer.test_train_net import ENGINES, EVALUATION, PRECISE_BN, stop_in, words, work
from transfer import train_net

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

ROOT = Path(__file__).parents[2]
READ_FILE = images.read_file


def recorded(out: Path) -> dict[int, dict[str, float]]:
    """Return the metrics and losses in metrics.json, by iteration."""
    lines = list(map(json.loads, (out / "metrics.json").read_text().splitlines()))
    assert len({line["iteration"] for line in lines}) == len(lines)  # nothing is repeated
    return {
        line["iteration"]: {name: value for name, value in line.items() if "AP" in name or "loss" in name}
        for line in lines
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_in_precise_bn_and_in_evaluation_loses_nothing(tmp_path, monkeypatch, engine):
    keys = {"SOLVER__MAX_ITER": 3, "TEST__EVAL_PERIOD": 2}
    keys |= {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2}
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    expected = work(tmp_path, engine, **keys, OUTPUT_DIR=str(whole))
    assert sorted(path.name for path in whole.glob("*.pth")) == ["model_final.pth"]
    words = ("step 2/3", "step 3/3", "precise BN over", " predictions")
    order = [word for line in (whole / "log.txt").read_text().splitlines() for word in words if word in line]
    assert order == ["step 2/3", *words[2:], "step 3/3", *words[2:]]  # losses come before the evaluation
    files: list[str] = []
    for place, flags in ((PRECISE_BN, ()), (EVALUATION, ("--resume",)), (EVALUATION, ("--resume",))):
        with monkeypatch.context() as patch:
            # The evaluation after iteration 1, then the last one.
            context = stop_in(patch, place, 1 if len(files) < 2 else 2)
            options = {"context": context, **keys, "OUTPUT_DIR": str(cut)}
            stopped(lambda flags=flags, options=options: work(tmp_path, engine, *flags, **options), "SIGTERM")
        if not files:  # as a run leaves it that was killed before its next checkpoint
            with open(cut / "metrics.json", "a") as metrics:
                metrics.write('{"iteration": 2, "bbox/AP": 99.0}\n')
        files.append(" ".join(sorted(path.name for path in cut.glob("*.pth"))))
        assert not (cut / "results.json").exists()
    assert files == ["model_0000001.pth", "model_0000001.pth", "model_final.pth"]
    assert torch.load(cut / "model_final.pth")["pending"] == "evaluation"
    assert work(tmp_path, engine, "--resume", **keys, OUTPUT_DIR=str(cut))["metrics"] == expected["metrics"]
    assert torch.load(cut / "model_final.pth")["pending"] == ""
    written = {path: path.read_bytes() for path in (cut / "model_final.pth", cut / "results.json")}
    assert work(tmp_path, engine, "--resume", **keys, OUTPUT_DIR=str(cut))["metrics"] == expected["metrics"]
    assert {path: path.read_bytes() for path in written} == written  # it was complete
    torch.testing.assert_close(*(torch.load(out / "model_final.pth")["model"] for out in (whole, cut)), rtol=0, atol=0)
    assert len(recorded(whole)) == 2 and recorded(cut) == recorded(whole)
    evaluated = work(tmp_path, engine, "--eval-only", "--resume", **keys, OUTPUT_DIR=str(cut))
    assert evaluated["metrics"] == expected["metrics"]
    assert evaluated["weights"]["path"] == str(cut / "model_final.pth")


def test_a_stop_while_no_batch_arrives_loses_no_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"SOLVER__MAX_ITER": 3, "DATASETS__TEST": ()}
    for number, remedy, saved in ((1, "no batch arrives", []), (3, "--resume", ["model_0000001.pth"])):
        with monkeypatch.context() as patch:
            stop_before_batch(patch, number)
            assert remedy in stopped(lambda: work(tmp_path, "torchvision", "--resume", **keys), "SIGTERM")
        assert [path.name for path in (tmp_path / "out").glob("*.pth")] == saved
    assert work(tmp_path, "torchvision", "--resume", **keys)["iteration"] == 3
    work(tmp_path, "torchvision", **keys, OUTPUT_DIR=str(tmp_path / "whole"))
    ends = (torch.load(tmp_path / out / "model_final.pth")["model"] for out in ("whole", "out"))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_image_that_goes_bad_in_training_is_named_and_costs_no_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    keys = {"SOLVER__MAX_ITER": 4, "DATASETS__TEST": ()}
    work(tmp_path, engine, **keys, OUTPUT_DIR=str(tmp_path / "whole"))
    lost: list[Path] = []
    reads = iter(range(1, 99))

    def read_file(path: str) -> bytes:
        if next(reads) == 7 and not lost:  # of two images in the batch that is tried, and per iteration
            lost.append(Path(path).rename(tmp_path / "lost.png"))
            lost.append(Path(path))
        return READ_FILE(path)

    with monkeypatch.context() as patch:
        patch.setattr(images, "read_file", read_file)
        error = refused(lambda: work(tmp_path, engine, **keys), "cannot read image", "--resume")
    assert str(lost[1]) in error
    assert [path.name for path in (tmp_path / "out").glob("*.pth")] == ["model_0000001.pth"]
    lost[0].rename(lost[1])
    work(tmp_path, engine, "--resume", **keys)
    ends = (torch.load(tmp_path / out / "model_final.pth")["model"] for out in ("whole", "out"))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_stop_of_several_processes_reaches_their_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them reads the run from a file, and is asked to stop by the request of the command that starts them."""

    def run_one(entry: str, words: list[str], count: int, folder: str, logs: Path, stop: StopRequest) -> None:
        assert (count, folder, logs.parent) == (2, str(tmp_path / "out"), tmp_path / "out/launch")
        signal.raise_signal(signal.SIGTERM)
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(RunContext(stop, logs.name), *words)

    monkeypatch.setattr(parent, "run_ranks", run_one)
    argv = words(tmp_path, "torchvision", "--num-gpus", "2", SOLVER__MAX_ITER=3, DATASETS__TEST=())
    stopped(lambda: train_net.main(argv), "SIGTERM")
    (checkpoint,) = (tmp_path / "out").glob("model_*.pth")
    assert torch.load(checkpoint, weights_only=True)["iteration"] == 0


@pytest.mark.slow
def test_a_signal_to_several_processes_ends_in_one_line(tmp_path: Path) -> None:
    """Sent to the whole process group during the ranks' imports, the signal takes effect once they can be stopped."""
    arguments = words(tmp_path, "torchvision", "--num-gpus", "2", SOLVER__MAX_ITER=5000)
    command = [sys.executable, str(ROOT / "transfer" / "train_net.py"), *arguments]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True)
    ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    deadline = time.monotonic() + 120
    while len(ranks.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGTERM)
    _, errors = run.communicate(timeout=240)
    last = "stopped by SIGTERM; a checkpoint is written; run the same command with --resume"
    assert run.returncode == 130 and errors.splitlines()[-1] == last, errors
    assert "Traceback" not in errors
    (checkpoint,) = (tmp_path / "out").glob("model_*.pth")
    assert torch.load(checkpoint, weights_only=True)["iteration"] <= 1  # several ranks agree one step later
