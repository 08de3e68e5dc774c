"""A submission happens completely or not at all: signals, a busy controller, job limits, and the copy of the code."""

import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.errors import refused
from tests.tools.launcher.fake_stages import FakeOnCpu, FakeTraining
from tests.tools.launcher.helpers import (
    Attached,
    chain,
    complete,
    fake,
    graph_of,
    job_of,
    nobody_reads,
    run_alone,
    wait_for,
)
from tests.transfer import tiny_coco
from tools import GUIDE, launch
from tools.launcher.execution import jobs, submit
from tools.launcher.graphs.dry_run import show_graph
from tools.launcher.graphs.graph import Node, build_single
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions

OPTIONS = JobOptions(cluster="slurm", gpus=0)


def scripts(cluster: Path) -> list[str]:
    return sorted(path.stem for path in cluster.glob("*.script"))


BUSY = "{ echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1; }"


def test_a_job_that_a_busy_controller_has_queued_is_not_submitted_again(tmp_path: Path, cluster: Path):
    (cluster / "after").write_text(f"[ $number != 101 ] || {BUSY}")
    assert start_graph(chain(tmp_path / "p"), OPTIONS) == 0
    assert scripts(cluster) == ["100", "101", "102"]
    assert [job_of(tmp_path / "p" / name).id for name in ("a", "b", "report")] == ["100", "101", "102"]


def test_a_busy_controller_is_asked_again_three_times(tmp_path: Path, cluster: Path):
    asked = f"echo >> {cluster}/asked; [ $(grep -c '' {cluster}/asked) -gt 3 ] || {BUSY}"
    (cluster / "before").write_text(asked)
    assert run_alone(fake(tmp_path / "run"), OPTIONS) == 0
    assert job_of(tmp_path / "run").id == "100"
    (cluster / "before").write_text(BUSY)
    refused(lambda: run_alone(fake(tmp_path / "other"), OPTIONS), "did not submit fake-other", "4 attempts", "Socket")
    assert not (tmp_path / "other").exists()


def test_a_job_that_may_be_queued_keeps_its_folder(tmp_path: Path, cluster: Path, programs: Callable):
    (cluster / "after").write_text(BUSY)
    programs(squeue="exit 1")
    refused(lambda: run_alone(fake(tmp_path / "run"), OPTIONS), "look for fake-run in squeue", "Socket timed out")
    assert scripts(cluster) == ["100"] and len(list(tmp_path.glob("run/launch/*/spec_0.json"))) == 1


@pytest.mark.parametrize(
    "name", ["SIGHUP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM"))]
)
def test_a_signal_waits_for_sbatch_and_then_leaves_nothing_queued(tmp_path: Path, cluster: Path, name: str):
    """The terminal sends Ctrl-C to sbatch, too."""
    (cluster / "after").write_text(f"[ $number != 101 ] || {{ touch {cluster}/waits; sleep 1; }}")
    launcher = Attached(f"start_graph(chain(Path({str(tmp_path / 'p')!r})), {OPTIONS!r})")
    wait_for((cluster / "waits").exists)
    launcher.signal(signal.Signals[name])
    printed = launcher.end()
    assert f"stopped by {name}" in printed
    assert "cancelled the submitted jobs: 100, 101" in printed
    assert (cluster / "cancelled").read_text().split() == ["100", "101"] and scripts(cluster) == ["100", "101"]


def test_a_job_whose_launcher_was_killed_before_its_record_is_not_submitted_again(tmp_path: Path, cluster: Path):
    for graph in (chain(tmp_path / "p"), build_single(fake(tmp_path / "alone"))):
        assert start_graph(graph, OPTIONS) == 0
        (job_id, script) = (cluster / "queue").read_text().splitlines()[-1].split("|")
        for record in Path(graph.output).rglob("launch.json"):
            record.unlink()
        scripts_before = scripts(cluster)
        (cluster / "queue").write_text(f"{job_id}|RUNNING|None|renamed|{script}\n")
        refused(lambda: start_graph(graph, OPTIONS), f"job {job_id} in the queue is of an", f"scancel {job_id}")  # noqa: B023
        assert scripts(cluster) == scripts_before
        (cluster / "queue").write_text("")
        assert start_graph(graph, OPTIONS) == 0


def test_a_job_that_could_not_be_cancelled_is_not_said_to_be(tmp_path: Path, cluster: Path, programs: Callable):
    (cluster / "after").write_text(f"[ $number != 101 ] || {{ touch {cluster}/waits; sleep 1; }}")
    programs(scancel="[ $1 != 101 ] || { echo socket timed out >&2; exit 1; }")
    launcher = Attached(f"start_graph(chain(Path({str(tmp_path / 'p')!r})), {OPTIONS!r})")
    wait_for((cluster / "waits").exists)
    launcher.signal(signal.SIGINT)
    printed = launcher.end()
    assert "scancel 101 failed: socket timed out" in printed and "cancelled the submitted jobs: 100\n" in printed
    assert "101 may still be in the queue" in printed and "no job of this command" not in printed


def test_all_jobs_are_submitted_where_nobody_reads_their_ids(tmp_path: Path, cluster: Path):
    with nobody_reads():
        assert start_graph(chain(tmp_path / "p"), OPTIONS) == 0
    assert scripts(cluster) == ["100", "101", "102"] and (cluster / "cancelled").read_text() == ""


def test_an_array_that_slurm_does_not_take_is_submitted_in_parts(tmp_path: Path, cluster: Path):
    large = "grep -qE 'array=0-([2-9]|1[0-9])' $1 && "
    (cluster / "before").write_text(f"{large}{{ echo Invalid job array specification >&2; exit 1; }} || true")
    points = [Node(f"{i}", fake(tmp_path / f"p/{i}")) for i in range(4)]
    assert start_graph(graph_of(tmp_path / "p", *points), OPTIONS) == 0
    records = [job_of(tmp_path / f"p/{i}") for i in range(4)]
    assert [job.id for job in records] == ["100_0", "100_1", "101_0", "101_1"]
    assert [job.dependency for job in records] == ["", "", *["afterany:100"] * 2]  # as many at once as asked


def test_an_array_is_split_before_slurm_refuses_it(tmp_path: Path, cluster: Path, programs: Callable, capsys):
    shown = "MaxArraySize            = 1001\nSchedulerParameters = max_array_tasks=3,bf_interval=1"
    programs(scontrol=f"[ \"$*\" = 'show config' ] && echo '{shown}'")
    graph = graph_of(tmp_path / "p", *(Node(f"{i}", fake(tmp_path / f"p/{i}")) for i in range(7)))
    assert show_graph(graph, OPTIONS) == 0
    assert re.findall("--array=(.*)%", capsys.readouterr().out) == ["0-2", "0-2"]  # and a job
    assert start_graph(graph, OPTIONS) == 0
    records = [job_of(tmp_path / f"p/{i}") for i in (0, 2, 3, 5, 6)]
    assert [job.id for job in records] == ["100_0", "100_2", "101_0", "101_2", "102"]
    assert [job.dependency for job in records] == ["", "", "afterany:100", "afterany:100", "afterany:101"]


def test_a_cancelled_job_that_slurm_is_still_ending_is_awaited(tmp_path: Path, cluster: Path, programs: Callable):
    assert start_graph(chain(tmp_path / "p"), OPTIONS) == 0
    ended = f"[ $(grep -c '' {cluster}/asked) -gt 3 ] && echo '100|CANCELLED|None|p-a'"
    programs(squeue=f"echo >> {cluster}/asked; {ended} || echo '100|COMPLETING|None|p-a'")
    ((job, state),) = jobs.wait_for_ending_jobs([tmp_path / "p/a"], period_s=0).values()
    assert (job.id, state.word) == ("100", "CANCELLED")
    assert start_graph(chain(tmp_path / "p"), OPTIONS) == 0
    assert job_of(tmp_path / "p/a").id == "103" and job_of(tmp_path / "p/b").dependency == "afterok:103"
    programs(squeue="echo '103|COMPLETING|None|p-a'")
    ((job, state),) = jobs.wait_for_ending_jobs([tmp_path / "p/a"], period_s=0).values()
    refused(lambda: job.check_not_running(state), "still ending job 103", "try again in a moment")


def test_beyond_the_limit_of_jobs_the_rest_waits_for_resume(tmp_path: Path, cluster: Path):
    limit = f"[ $(ls {cluster} | grep -c script) -lt 1 ] || {{ echo QOSMaxSubmitJobPerUserLimit >&2; exit 1; }}"
    (cluster / "before").write_text(limit)
    text = refused(lambda: start_graph(chain(tmp_path / "p"), OPTIONS), "QOSMaxSubmitJobPerUserLimit", "1 stage ")
    assert "submit them: python tools/launch.py resume p " in text
    assert (cluster / "cancelled").read_text() == "" and job_of(tmp_path / "p/a").id == "100"
    (cluster / "before").write_text("echo AssocGrpSubmitJobsLimit >&2; exit 1")
    refused(lambda: run_alone(fake(tmp_path / "new"), OPTIONS), "wait until some of your jobs have ended")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("limits", "is_named"), [("2", True), ("2\\n\\n", False), ("3", False)])
def test_a_limit_of_jobs_is_named_before_the_submission(
    tmp_path: Path, cluster: Path, programs: Callable, monkeypatch, capsys, limits: str, is_named: bool
):
    """Of two accounts, one may have no limit."""
    programs(sacctmgr=f"[ $4 = user=me ] && printf '{limits}\\n'")
    monkeypatch.setenv("USER", "me")
    assert show_graph(chain(tmp_path / "p"), OPTIONS) == 0
    named = "this submits 3 jobs, but your account may have 2 in the queue at a time"
    assert (f"# warning: {named}" in capsys.readouterr().out) == is_named


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'This is job 1 of your 3 today.'; echo Submitted batch job 77",
        "printf '\\377 Welcome\\n\\033[32mSubmitted batch job 77\\033[0m\\n'; exit 1",  # its last line
        "printf '\\377\\n' >&2; echo '77;alex'",  # SBATCH_PARSABLE
        "printf 'Press Enter: '; read answer; echo Submitted batch job 77",  # which nobody sees
        "echo 1200; echo Submitted batch job 77",  # of its GPU hours
        "echo Submitted job 77",
        # A controller fails over, and is asked again.
        "mkdir asked 2> /dev/null && { echo Slurm backup controller in standby mode >&2; exit 1; }; echo 77",
        "mkdir asked 2> /dev/null && { echo Connection refused >&2; exit 1; }; echo 77",
    ],
)
def test_the_wrapper_of_a_site_may_print_more(tmp_path: Path, cluster: Path, programs: Callable, capsys, answer: str):
    programs(sbatch=f"echo 'sbatch: warning: 98% of your hours' >&2; {answer}")
    assert run_alone(fake(tmp_path / "run"), OPTIONS) == 0
    assert job_of(tmp_path / "run").id == "77"
    assert "sbatch: warning: 98% of your hours" in capsys.readouterr().err


def test_the_code_is_copied_once_per_version_and_repaired(tmp_path: Path, cluster: Path, monkeypatch):
    submit.copy_code(tmp_path / "run")
    (copy,) = tmp_path.glob("run/launch/code-*")
    assert (copy / GUIDE).is_file()  # which the report of a job names
    (copy / "tools/launch.py").unlink()  # a purge of old files
    assert run_alone(fake(tmp_path / "run"), OPTIONS) == 0
    assert list(tmp_path.glob("run/launch/code-*")) == [copy] and (copy / "tools/launch.py").exists()
    (copy / "GIT_STATE").write_text("is written with each copy")
    (cluster / "queue").write_text("100|FAILED|None|fake-run\n")
    assert run_alone(fake(tmp_path / "run"), OPTIONS) == 0 and job_of(tmp_path / "run").id == "101"
    assert (copy / "GIT_STATE").read_text() == "is written with each copy"
    assert f"export PYTHONPATH={copy}" in (cluster / "100.script").read_text()
    edited = tmp_path / "edited/tools"
    (edited / "__pycache__").mkdir(parents=True)
    (edited / "__pycache__/a.cpython-311.pyc.140").write_text("which Python renames at any time")
    (edited / "a.py").write_text("edited")
    (edited / "broken.py").symlink_to("nowhere.py")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/b.py").write_text("of a group's shared folder")
    (edited / "linked").symlink_to(tmp_path / "linked")
    monkeypatch.setattr(submit, "ROOT", tmp_path / "edited")
    second = submit.copy_code(tmp_path / "run")
    assert second != copy and {path.name for path in second.rglob("*.*")} == {"a.py", "b.py"}


def test_a_script_has_no_wckey_the_users_dependency_and_options_of_srun(tmp_path: Path, cluster: Path):
    options = replace(OPTIONS, sbatch={"dependency": "afterok:7"}, srun={"mpi": "none", "overlap": ""}, python="a b")
    assert start_graph(chain(tmp_path / "p"), options) == 0
    first, second = ((cluster / f"{number}.script").read_text() for number in (100, 101))
    assert "--wckey" not in first and "#SBATCH --dependency=afterok:7\n" in first
    assert "#SBATCH --dependency=afterok:7,afterok:100\n" in second
    assert re.search("^srun .*--mpi=none --overlap a b -u -m tools.launcher", first, re.MULTILINE)


def test_the_cost_is_that_of_every_attempt(tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture):
    options = replace(OPTIONS, gpus=8, time="24:00:00")
    assert start_graph(chain(tmp_path / "p"), options) == 0
    shown = capsys.readouterr().out
    assert "# fake: 2 jobs, each at most 8 GPUs x 24 h x 3 attempts = 1,152 GPU-hours\n" in shown
    assert "# at most 1,152 GPU-hours in total (--max-timeouts" in shown
    nodes = [Node("x", fake(tmp_path / "x")), Node("y", FakeOnCpu(str(tmp_path / "y")))]
    assert start_graph(graph_of(tmp_path / "q", *nodes), replace(options, time="0,fake_on_cpu=60")) == 0
    shown = capsys.readouterr().out
    assert "# fake: 1 job with 8 GPUs, without a time limit\n" in shown
    assert "# no limit in total, because fake may run forever (--max-timeouts" in shown
    assert start_graph(build_single(FakeOnCpu(str(tmp_path / "a"))), options) == 0
    assert "no GPU-hours" in capsys.readouterr().out


def test_slurm_is_asked_about_each_kind_of_job(tmp_path: Path, cluster: Path, programs: Callable, capsys):
    programs(sbatch="echo $1: Job 7 to start now >&2\n! grep -q -e --time=30")
    nodes = [
        Node(key, FakeOnCpu(str(tmp_path / key)) if key == "c" else fake(tmp_path / key), ("a",) * (key == "b"))
        for key in "abc"
    ]
    assert show_graph(graph_of(tmp_path / "p", *nodes), OPTIONS, ask_slurm=True) == 2
    shown = capsys.readouterr().out
    assert "# a: --test-only: Job 7 to start now\n" in shown and "# c: sbatch --test-only: --test-only" in shown
    assert "# b: " not in shown  # it asks for the same as a
    assert scripts(cluster) == []


def test_a_purged_checkpoint_that_a_stage_needs_is_refused(tmp_path: Path, cluster: Path, capsys):
    trained = FakeTraining(str(tmp_path / "p/a"))
    graph = graph_of(tmp_path / "p", Node("a", trained), Node("b", fake(tmp_path / "p/b"), ("a",)))
    complete(graph.nodes[0].stage)
    refused(lambda: start_graph(graph, OPTIONS), "b: the checkpoint is gone from p/a")
    (tmp_path / "p/a/checkpoint_final.pth").touch()
    assert start_graph(graph, OPTIONS) == 0 and "runs again" not in capsys.readouterr().err
    complete(graph.nodes[1].stage)
    (tmp_path / "p/a/results.json").unlink()
    (cluster / "queue").write_text("")
    shutil.rmtree(tmp_path / "p/report")
    assert start_graph(graph, OPTIONS) == 0
    warning = "a has no result and runs again, although every stage that depends on it is complete"
    assert warning in capsys.readouterr().err


def test_more_cores_than_a_node_has_are_refused(tmp_path: Path, cluster: Path, programs: Callable):
    programs(sinfo="printf 'CLUSTER: c64\\n4\\n16\\n'")
    asked = replace(OPTIONS, tasks=2, cpus_per_task=9)
    refused(lambda: run_alone(fake(tmp_path / "run"), asked), "--cpus-per-task 9", "18 cores", "more than 16")
    assert run_alone(fake(tmp_path / "run"), replace(asked, cpus_per_task=8)) == 0


@pytest.mark.parametrize("is_checked", [False, True])
def test_data_that_this_machine_does_not_have(tmp_path: Path, cluster: Path, capsys, is_checked: bool):
    words = ["pretrain", "--method", "mocov2", "--cluster", "slurm", *["--check-data"] * is_checked, "OUTPUT_DIR", "r"]
    assert launch.main([*words, "DATA.TRAIN", "folder:$SLURM_TMPDIR/data"]) == 0
    assert "folder:$SLURM_TMPDIR/data is not checked here" in capsys.readouterr().err
    words[-1] = "s"
    if is_checked:
        refused(lambda: launch.main([*words, "DATA.TRAIN", "folder:gone"]), "no image folder at gone")
    else:
        assert launch.main([*words, "DATA.TRAIN", "folder:gone"]) == 0
        assert "this machine does not have the data: no image folder at gone" in capsys.readouterr().err
    refused(lambda: launch.main([*words, "--gpus", "1", "--tasks", "2"]), "--tasks 2 is more than the 1 GPU")


@pytest.mark.detectron2
def test_what_detectron2_would_refuse_in_the_job_is_refused_before_it(tmp_path: Path, cluster: Path):
    words = [
        "transfer",
        "--config-file",
        tiny_coco.BASE,
        "--cluster",
        "slurm",
        "--engine",
        "detectron2",
        "OUTPUT_DIR",
        "r",
    ]
    words += tiny_coco.words(tiny_coco.MODEL_KEYS)
    refused(lambda: launch.main([*words, "MODEL.FPN.FUSE_TYPE", "mean"]), "MODEL.FPN.FUSE_TYPE is 'mean'", "avg, sum")
    assert scripts(cluster) == []
