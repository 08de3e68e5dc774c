"""Records that earlier versions wrote: their jobs are shown, cancelled and resumed as they were started.

golden/launched/ has what two of them left for a probe with --time, one with a site file of 20 hours (2 for stages
without GPUs), and a pipeline with that site file. The first knew no limits per stage and recorded no working folder.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.errors import refused
from tests.tools.launcher.helpers import ROOT
from tools import launch
from tools.launcher.execution.job import read_jobs
from tools.launcher.execution.job_file import read_job
from tools.launcher.execution.records import find_launch_files
from tools.launcher.graphs import start
from tools.launcher.record_formats import LAUNCH_FILE, PIPELINE_FILE, read_launch, read_pipeline
from tools.stages.registry import build_stage

LAUNCHED = ROOT / "tests/golden/launched"
LISTS, OPTIONS = VERSIONS = ("aef2ccd2", "a1d2a1c7")


def copy(version: str, folder: Path) -> Path:
    """Copy the records as if they had been written in ``folder``, where they name the working folder."""
    for file in (LAUNCHED / version).rglob("*.json"):
        target = folder / file.relative_to(LAUNCHED / version)
        target.parent.mkdir(parents=True)
        target.write_text(file.read_text().replace("/earlier", str(folder)))
    return folder


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Record the time limit of each stage that the commands would start, in minutes."""
    calls: list[dict[str, int]] = []

    def run(graph, options, _check_data) -> int:
        calls.append({node.stage.name: options.for_stage(node.stage).minutes for node in graph.nodes})
        return 0

    monkeypatch.setattr(start, "start_graph", run)
    return calls


@pytest.mark.parametrize(
    ("version", "probe_with_site", "probe_in_pipeline"), [(LISTS, 20 * 60, 20 * 60), (OPTIONS, 240, 240)]
)
def test_a_resumed_stage_gets_the_time_limit_that_it_had(
    version: str, probe_with_site: int, probe_in_pipeline: int, limits: list[dict[str, int]], tmp_path: Path
) -> None:
    copy(version, tmp_path)
    for folder in ("knn_asked", "knn_site", "pipe/m/knn", "pipe"):
        assert launch.main(["resume", folder]) == 0
    alone = [{"knn": 24 * 60}, {"knn": probe_with_site}, {"knn": probe_in_pipeline}]
    assert limits == [*alone, {"pretrain": 20 * 60, "knn": probe_in_pipeline}]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_limit_replaces_only_those_that_it_names(version: str, limits: list[dict[str, int]], tmp_path: Path):
    copy(version, tmp_path)
    assert launch.main(["resume", "pipe", "--time", "knn=30"]) == 0
    assert launch.main(["resume", "pipe", "--time", "60"]) == 0
    assert launch.main(["resume", "knn_site", "--time", "10:00:00"]) == 0
    assert limits == [{"pretrain": 1200, "knn": 30}, {"pretrain": 60, "knn": 60}, {"knn": 600}]


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_of_an_earlier_version_are_shown_and_cancelled(version: str, cluster: Path, tmp_path: Path, capsys):
    copy(version, tmp_path)
    jobs = [job for file in find_launch_files(tmp_path) for job in read_jobs(file.parents[1])]
    assert len(jobs) == 5 and all(job.script.endswith("/submission.sh") for job in jobs)
    lines = [f"{job.id}|PENDING|Resources|renamed|{job.script}\n" for job in jobs]
    (cluster / "queue").write_text("".join(lines))
    assert launch.main(["status", "."]) == 0
    assert capsys.readouterr().out.startswith("5 pending\n")
    refused(lambda: launch.main(["resume", "knn_asked"]), "job 101 is already pending in")
    assert launch.main(["cancel", "."]) == 0
    assert sorted((cluster / "cancelled").read_text().split()) == sorted(job.id for job in jobs)


def test_relative_names_without_a_working_folder_are_those_of_a_folder_above_the_run(
    limits: list[dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    copy(LISTS, tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    assert launch.main(["resume", "pipe"]) == 0
    assert "did not record the folder of folder:images; it is taken for this one" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "a/pipe/m")
    for folder in ("..", "knn"):
        refused(lambda folder=folder: launch.main(["resume", folder]), "rerun the original command in that folder")
    assert len(limits) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_read_is_what_this_version_writes(version: str, tmp_path: Path) -> None:
    copy(version, tmp_path)
    launched = read_launch(tmp_path / "knn_asked")
    pipeline = read_pipeline(tmp_path / "pipe" / PIPELINE_FILE)
    for file, record in (
        (tmp_path / "knn_asked" / LAUNCH_FILE, launched),
        (tmp_path / "pipe" / PIPELINE_FILE, pipeline),
    ):
        file.write_text(json.dumps(asdict(record)))
    assert read_launch(tmp_path / "knn_asked") == launched
    assert read_pipeline(tmp_path / "pipe" / PIPELINE_FILE) == pipeline
    for stage in pipeline.stages:
        assert build_stage(stage["spec"]).fingerprint() == stage["fingerprint"]
    assert launched.cwd == ("" if version == LISTS else str(tmp_path))


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    for name, file in (("run", LAUNCH_FILE), ("pipe", PIPELINE_FILE)):
        (tmp_path / name / "launch").mkdir(parents=True)
        (tmp_path / name / file).write_text('{"version": 2}')
        refused(lambda name=name: launch.main(["resume", name]), "is of a newer version of this program (2)")
        refused(lambda name=name: launch.main(["status", name]), "is of a newer version of this program (2)")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_reads_the_job_of_a_launcher_that_an_earlier_version_started(version: str, tmp_path: Path) -> None:
    copy(version, tmp_path)
    spec = json.loads((tmp_path / "knn_asked" / LAUNCH_FILE).read_text())["spec"]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    assert build_stage(read_job(tmp_path / "spec.json")["spec"]).folder == str(tmp_path / "knn_asked")
