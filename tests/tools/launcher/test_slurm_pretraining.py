"""A real pretraining on a real SLURM cluster whose time is too short, or whose node dies while it writes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pretrain.runs import assert_same_end, lines, overrides
from tests.slurm_cluster import SlurmCluster
from tests.tools.launcher.helpers import run_alone, tries, wait_for
from tools.launcher import stages
from tools.launcher.options import Options
from tools.launcher.spec import read_record
from tools.launcher.submit import submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
_SLOW_STEPS = """
import time
from pretrain.watch import Watch
real = Watch.step
def step(*args):
    time.sleep(5)
    real(*args)
Watch.step = step
"""
_STUCK_CHECKPOINT = """
import os, time
from pathlib import Path
from pretrain.common import run_folder
real = os.replace
def replace(source, target):
    marker = Path({marker!r})
    if str(target).endswith("checkpoint_00000008.pth") and not marker.exists():
        marker.touch()
        time.sleep(600)
    real(source, target)
os.replace = replace
"""


def extend(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Jobs import a module with this ``text``, as --import does."""
    (folder / "extension.py").write_text(text)
    monkeypatch.setenv("P2T_IMPORT", str(folder / "extension.py"))


@pytest.fixture
def whole(images: Path, tmp_path: Path) -> Path:
    run_alone(stages.pretrain("", overrides(images, tmp_path / "whole", "SOLVER.EPOCHS", "1")))
    return tmp_path / "whole"


def test_a_time_limit_shorter_than_an_epoch_still_ends_with_the_same_bits(
    slurm_options: Options, slurm_cluster: SlurmCluster, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    whole: Path,
):  # fmt: skip
    """An epoch of 6 steps takes 30 s beside the start; each attempt may use 60 s less 40 s."""
    extend(monkeypatch, tmp_path, _SLOW_STEPS)
    never = ("SOLVER.EPOCHS", "1", "SOLVER.CHECKPOINT_PERIOD", "1000000")
    spec = stages.pretrain("", overrides(images, tmp_path / "cut", *never))
    (job,) = submit([spec], replace(slurm_options, time="1", signal_delay=40))
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", "TIMEOUT", seconds=420)
    ended = [(one["state"], one["reason"].partition(":")[0]) for one in tries(tmp_path / "cut")]
    assert len(ended) > 1 and set(ended[:-1]) == {("requeued", "SIGUSR2")} and ended[-1] == ("done", "")
    assert [line["iteration"] for line in lines(tmp_path / "cut", "loss")] == list(range(6))
    assert_same_end(tmp_path / "cut", whole)


def test_a_node_that_dies_while_it_writes_a_checkpoint_costs_that_checkpoint(
    slurm_options: Options, slurm_cluster: SlurmCluster, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_alone(stages.pretrain("", overrides(images, tmp_path / "whole")))
    marker = tmp_path / "writing"
    extend(monkeypatch, tmp_path, _STUCK_CHECKPOINT.format(marker=str(marker)))
    (job,) = submit([stages.pretrain("", overrides(images, tmp_path / "cut"))], slurm_options)
    wait_for(marker.exists, 120)
    shown = subprocess.run(["squeue", "-h", "-j", job.job_id, "-o", "%N"], capture_output=True, text=True)
    node = shown.stdout.strip()
    slurm_cluster.kill_node(node)
    try:
        slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", seconds=240)
    finally:
        slurm_cluster.start_node(node)
    assert len(tries(tmp_path / "cut")) == 2
    assert "resumed from checkpoint_00000004.pth at step 4 of 12" in (tmp_path / "cut/log.txt").read_text()
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
    assert not list((tmp_path / "cut").glob(".*tmp*"))
    assert read_record(tmp_path / "cut/launch/complete.json")
