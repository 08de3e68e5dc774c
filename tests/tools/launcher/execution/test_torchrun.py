"""Several machines without SLURM; here, each of two torchrun agents represents a machine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.runs import lines, overrides
from tests.tools.launcher.helpers import ROOT, build_pretrain, run_alone


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
