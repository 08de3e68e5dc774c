"""Every test of the launcher runs in an empty folder, without a site file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.common.config import extensions
from tests.slurm_cluster import SlurmCluster
from tests.tools.launcher.helpers import ROOT
from tools.launcher.execution import slurm, submit
from tools.launcher.job_options import JobOptions, resolve_options


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "slurm_cluster" not in request.fixturenames:  # which lives until the session ends
        monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the fake stages are not in the jobs' copy of the code
    monkeypatch.setenv(extensions.VARIABLE, "tests.tools.launcher.fake_stages")
    monkeypatch.chdir(tmp_path)
    slurm.read_max_cores.cache_clear()
    slurm.read_max_array.cache_clear()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes shell scripts as programs, the only ones on PATH besides those in ``path``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(path: str = "", **scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        if path:
            monkeypatch.setenv("PATH", f"{folder}:{path}")

    return write


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Callable[..., None]) -> Path:
    """Replace SLURM's programs by fakes, whose jobs are numbered from 100.

    Returns the folder with the accepted scripts, the environment of the last one, the queue, a line per question and
    the cancelled jobs. ``before`` and ``after`` are shell lines that sbatch runs before and after it accepts a script.
    """
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("before", "after", "queue", "cancelled"):
        (folder / name).touch()
    sbatch = (
        f". {folder}/before\nenv > {folder}/env\n"
        f"number=$((100 + $(ls {folder} | grep -c script)))\ncp $1 {folder}/$number.script\n"
        f'echo "$number|$1" >> {folder}/queue\n. {folder}/after\necho Submitted batch job $number'
    )
    squeue = f"echo >> {folder}/asked; cat {folder}/queue"
    scancel = f"for id; do :; done; echo $id >> {folder}/cancelled"
    programs("/usr/bin:/bin", sbatch=sbatch, squeue=squeue, sacct="", scancel=scancel)
    monkeypatch.setattr(slurm, "_RETRY_S", 0)
    monkeypatch.setattr(submit, "CODE", ("tools",))  # is copied fast
    return folder


@pytest.fixture
def slurm_options(slurm_cluster: SlurmCluster) -> JobOptions:
    slurm_cluster.wait_idle()
    return resolve_options({"cluster": "slurm", "gpus": 0, "time": "30", "signal_delay": 30, "max_timeouts": 100})
