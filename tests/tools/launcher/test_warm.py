"""Stages of a local pipeline that are forked from a process which has done their imports: as if each were started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tools.launcher.helpers import ROOT, fake, job_of
from tools.launcher.graph import Graph, Node, run
from tools.launcher.options import Options
from tools.launcher.ranks import attempts
from tools.launcher.spec import read_json

STAGES = {
    "compute": (), "mistake": ("fail", 0, True), "error": ("fail",), "killed": ("die",), "count": ("count", 3),
    "requeued": ("come_back", 7),  # more often than submitit would start it
}  # fmt: skip


def graph_in(folder: Path) -> Graph:
    nodes = tuple(Node(key, fake(folder / key, *(args or (key,)))) for key, args in STAGES.items())
    return Graph("pipeline", str(folder), nodes, fake(folder / "report"))


def run_in(folder: str) -> int:
    return run(graph_in(Path(folder)), Options(cluster="local", gpus=0, cpus_per_task=1))


def test_warm_stages_behave_like_started_ones(tmp_path: Path):
    code = f"import sys; from tests.tools.launcher.test_warm import run_in; sys.exit(run_in({str(tmp_path)!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr  # of the first failure, a user's mistake
    assert "error: the value is 3; it must be 2\n[2/6] mistake: failed" in done.stderr
    assert "RuntimeError: rank 0 cannot go on" in done.stderr and "[3/6] error: failed" in done.stderr
    assert "rank 0: it was killed by SIGKILL" in done.stderr
    assert "counting from 0" in done.stdout and "submitit" not in done.stdout
    assert read_json(tmp_path / "compute/results.json") == {
        "sum": 512.0**3, "threads": 1, "born_with_torch": True, "start_method": "fork", "cuda": False,
        "environment": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RANK": "0"},
    }  # fmt: skip
    states = {key: [one["state"] for one in attempts(tmp_path / key, job_of(tmp_path / key)["id"])] for key in STAGES}
    assert states == {
        "compute": ["done"], "mistake": ["failed"], "error": ["failed"], "requeued": ["requeued"] * 7 + ["done"],
        "killed": ["failed"], "count": ["done"],
    }  # fmt: skip
