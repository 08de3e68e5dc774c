"""Every test of the launcher runs in an empty folder, without a site file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster
from tests.tools.launcher.helpers import ROOT
from tools.launcher import slurm
from tools.launcher.options import Options, resolve


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "slurm_cluster" not in request.fixturenames:  # which lives until the session ends
        monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the fake stages are not in the jobs' copy of the code
    monkeypatch.chdir(tmp_path)
    slurm.max_cores.cache_clear()


@pytest.fixture
def slurm_options(slurm_cluster: SlurmCluster) -> Options:
    slurm_cluster.wait_idle()
    return resolve({"cluster": "slurm", "gpus": 0, "time": "30", "signal_delay": 30, "max_timeouts": 100})
