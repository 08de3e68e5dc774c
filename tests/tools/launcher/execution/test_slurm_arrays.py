"""Jobs of an array that are renamed or cancelled one by one on a real SLURM cluster."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster
from tests.tools.launcher.helpers import fake, graph_of, job_of, shown, wait_for
from tools.launcher.execution import jobs
from tools.launcher.execution.job import query_states
from tools.launcher.graphs.graph import Node
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ARRAY = ("a", "b", "c", "d")


def test_some_jobs_of_an_array_are_renamed_and_others_cancelled(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path
):
    nodes = [Node(name, fake(tmp_path / name, "count", 1000, 0.2)) for name in ARRAY]
    graph = graph_of(tmp_path, *nodes, Node("after", fake(tmp_path / "after"), ("b",)))
    options = replace(slurm_options, parallel=2)  # c and d wait for a and b
    assert start_graph(graph, options) == 0
    ids = {name: job_of(tmp_path / name).id for name in (*ARRAY, "after")}
    wait_for(lambda: (tmp_path / "a/count.0").exists() and (tmp_path / "b/count.0").exists())
    for name in "ac":
        subprocess.run(["scontrol", "update", f"JobId={ids[name]}", f"JobName=mine-{name}"], check=True)
    subprocess.run(["scancel", ids["b"], ids["d"]], check=True)
    for name in ("b", "d", "after"):  # which builds on b
        slurm_cluster.wait_state(ids[name], "CANCELLED")
    wait_for((tmp_path / "c/count.0").exists)
    states = {name: shown(tmp_path / name)["state"] for name in ids}
    assert states == {"a": "running", "b": "cancelled", "c": "running", "d": "cancelled", "after": "cancelled"}

    assert start_graph(graph, options) == 0
    submitted = {name for name in ids if job_of(tmp_path / name).id != ids[name]}
    assert submitted == {"b", "d", "after"}
    jobs.cancel(tmp_path)
    last_jobs = [job_of(tmp_path / name) for name in ids]
    wait_for(lambda: not any(state.is_active for state in query_states(last_jobs)), 120)
