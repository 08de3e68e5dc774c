"""Several stages of a graph at the same time on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launcher.helpers import ROOT, fake, steps, wait_for
from tools.launcher import warm
from tools.launcher.graph import Graph, Node, run
from tools.launcher.options import Options
from tools.launcher.spec import read_json


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_PRELOAD", [])  # these stages do not import torch


def pair(folder: Path) -> list[Node]:
    """Two stages, each of which fails unless the other one runs at the same time."""
    return [Node(a, fake(folder / a, "meet", str(folder / b))) for a, b in (("a", "b"), ("b", "a"))]


def graph_of(folder: Path, *nodes: Node) -> Graph:
    return Graph("pipeline", str(folder), nodes, fake(folder / "report"))


def two(gpus: int = 0, **given: object) -> Options:
    return Options(cluster="local", gpus=gpus, tasks=1, parallel=2, **given)  # type: ignore[arg-type]


def test_two_stages_run_at_the_same_time_each_with_its_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    last = Node("last", fake(tmp_path / "last", "count", 1), ("a", "b"))
    assert run(graph_of(tmp_path, *pair(tmp_path), last), two(gpus=1, cpus_per_task=1)) == 0
    found = [read_json(tmp_path / name / "results.json") for name in ("a", "b")]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in found} == {"3", "5"}
    assert {one["OMP_NUM_THREADS"] for one in found} == {"1"}
    assert "last: counting from 0" in capfd.readouterr().out  # whose line it is


def test_a_stage_waits_for_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Two GPUs, and both stages need two: one after the other."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    nodes = [Node(name, fake(tmp_path / name, "count", 3, 0.1)) for name in "ab"]
    assert run(graph_of(tmp_path, *nodes), two(gpus=2)) == 0
    shown = capfd.readouterr().out
    assert shown.index("[1/2] a: ") < shown.index("[2/2] b -> ")


def test_a_failure_ends_its_own_branch_only(tmp_path: Path, capfd: pytest.CaptureFixture):
    bad = Node("bad", fake(tmp_path / "bad", "fail", 0, True))
    child = Node("child", fake(tmp_path / "child"), ("bad",))
    assert run(graph_of(tmp_path, bad, child, *pair(tmp_path)), two()) == 2
    shown = capfd.readouterr().err
    assert "[1/4] bad: failed; the other branches continue" in shown
    assert "[2/4] child: skipped, because bad failed" in shown
    assert (tmp_path / "a/results.json").exists() and (tmp_path / "b/results.json").exists()


def test_one_signal_stops_all_of_them(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from tests.tools.launcher.test_local_graph import *\n"
        f"warm._PRELOAD = []; folder = Path({str(tmp_path)!r})\n"
        "nodes = [Node(name, fake(folder / name, 'count', 1000, 0.05)) for name in 'abc']\n"
        "sys.exit(run(graph_of(folder, *nodes), two()))"
    )
    started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "a/count.0").exists() and (tmp_path / "b/count.0").exists())
    os.kill(started.pid, signal.SIGTERM)
    _, shown = started.communicate(timeout=60)
    assert started.returncode == 130
    for name in "ab":
        assert 0 < len(steps(tmp_path / name)) == int((tmp_path / name / "count.0").read_text()) < 1000
    assert shown.count("SIGTERM: counted to") == 2
    assert f"to continue: python tools/launch.py resume {tmp_path}" in shown
    assert not (tmp_path / "c").exists()
