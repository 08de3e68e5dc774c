"""Helpers of the launcher's tests: fake stages and programs, and the files that jobs leave in a run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.run.state import read_record, update_state
from tools.launcher.graph import Graph, Node, build_graph, build_single
from tools.launcher.options import Options
from tools.launcher.records import read_outcome
from tools.launcher.spec import StageSpec
from tools.launcher.start import start_graph
from tools.launcher.status import collect
from tools.launcher.submit import copy_code, submit

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
TINY = ["MODEL.ARCH", "resnet18", "SOLVER.EPOCHS", "2"]
HERE = Options(cluster="local", gpus=0)


def fake(folder: Path | str, function: str = "count", *args: object) -> StageSpec:
    """Build a stage of `fake_stages`; one that counts counts to 1 unless ``args`` say otherwise."""
    args = args or ((1,) if function == "count" else ())
    return StageSpec("fake", str(folder), f"tests.tools.launcher.fake_stages:{function}", args=(str(folder), *args))


def graph_of(folder: Path, *nodes: Node) -> Graph:
    return build_graph(str(folder), nodes, fake(folder / "report"))


def job_of(folder: Path | str) -> dict[str, Any]:
    return read_record(Path(folder) / "launch" / "launch.json")["jobs"][-1]


def run_alone(spec: StageSpec, options: Options = HERE) -> int:
    return start_graph(build_single(spec), options)


def submit_jobs(specs: Sequence[StageSpec], options: Options) -> list[str]:
    """Submit stages without what `start_graph` checks; return the jobs' ids."""
    return submit(specs, options, copy_code(os.path.commonpath([spec.folder for spec in specs])))


def outcome(folder: Path) -> dict[str, Any]:
    """Return what the folder's last job has recorded."""
    return read_outcome(folder, job_of(folder)["logs"])


def end(folder: Path, state: str, **values: Any) -> None:
    """Record what a job whose submission is called s records when it ends; other ``values`` replace its own."""
    times = {"started": time.time(), "ended": time.time()}
    update_state(folder, **{"stage": "knn", "state": state, "job": "s", "attempt": 0, "host": "h", **times, **values})


def complete(spec: StageSpec) -> StageSpec:
    """Write what a complete job leaves."""
    end(Path(spec.folder), "complete", stage=spec.stage, fingerprint=spec.fingerprint(), work=spec.identity)
    Path(spec.folder, spec.produces).write_text("{}")
    return spec


def shown(folder: Path) -> dict[str, Any]:
    """Return the status of the stage in a folder."""
    (stage,) = collect(folder)
    return stage


def steps(folder: Path, rank: int = 0) -> list[int]:
    return [int(line) for line in (folder / f"steps.{rank}").read_text().split()]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def programs(monkeypatch: pytest.MonkeyPatch, folder: Path, path: str = "", **scripts: str) -> None:
    """Set a PATH that begins with these programs, and continues with ``path``."""
    (folder / "bin").mkdir()
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{path}".rstrip(":"))
