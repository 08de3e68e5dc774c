"""Several machines without SLURM; here, each of two torchrun agents represents a machine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.common.run.state import read_failure
from tests.pretrain.runs import lines, overrides
from tests.tools.launcher.helpers import ROOT, build_pretrain, run_alone


@pytest.mark.slow
def test_a_failure_under_torchrun_is_recorded_once_per_rank(images: Path, tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pretrain"]
    words = overrides(images, tmp_path / "run", "MODEL.BN_GROUPS", "2", "SOLVER.BASE_LR", "1e30")
    ended = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=180)
    failure = read_failure(tmp_path / "run")
    assert ended.returncode and "rank " in failure["error"]
    assert (failure["job"], failure["user_error"], failure["followed"]) == ("", True, False)
    assert failure["error"] in ended.stderr


@pytest.mark.slow
def test_two_machines_that_torchrun_joins_train_as_one_process(images: Path, tmp_path: Path):
    more = ("MODEL.BN_GROUPS", "4", "SOLVER.MAX_STEPS", "3", "SOLVER.BASE_LR", "0.01")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", "test", "-m", "pretrain"]
    command = [*agent, *overrides(images, tmp_path / "two", *more)]
    machines = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [machine.communicate(timeout=180)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], errors
    assert run_alone(build_pretrain("", overrides(images, tmp_path / "one", *more))) == 0
    losses = [line["loss"] for line in lines(tmp_path / "two", "loss")]
    expected = [line["loss"] for line in lines(tmp_path / "one", "loss")]
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 3
