"""The options of a job: a site's file, single stages, what sbatch is given, and programs that do not answer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import programs
from tools.launcher import options, resolve, slurm, stages
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec


@pytest.fixture(autouse=True)
def no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def from_site(tmp_path: Path, text: str, **given: object) -> Options:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(text.encode("latin-1"))
    return resolve.resolve({"cluster": "slurm", **given}, str(file))


def test_a_sites_values_have_their_types(tmp_path: Path):
    text = (
        "account: 0042\ngpus: 4\nmax-timeouts: 0\nqos: on\ntime: 4:00:00\nsetup: |\n  module load cuda\n  export A=b\n"
    )
    found = from_site(tmp_path, text)
    assert (found.account, found.gpus, found.max_timeouts, found.qos) == ("0042", 4, 0, "on")
    assert (found.minutes, found.setup) == (240, ("module load cuda", "export A=b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: four\n", "gpus in .*cluster.yaml is 'four'; it must be a whole number"),
        ("gpus: 1.5\n", "gpus in .* is '1.5'; it must be a whole number"),
        ("max-timeouts: -1\n", "--max-timeouts is -1; .* at least 0"),
        ("partition: [a, b]\n", r"partition in .* is \['a', 'b'\]; it must be one value"),
        ("setup: [{a: b}]\n", "setup in .*; it must be shell lines, each in quotes"),
        ("sbatch: reservation\n", "sbatch in .* is 'reservation'; it must be 'option: value' lines"),
        ("stages: [convert]\n", "stages in .* must hold a block"),
        ("stages: {convrt: {partition: cpu}}\n", "unknown stage convrt .*did you mean 'convert'"),
        ("stages: {convert: {cluster: local}}\n", "unknown key cluster in .*stages: convert"),
        ("stages: {convert: {time: 4h}}\n", "--time '4h'"),
        ("- a\n", "must hold 'key: value' lines"),
        ("a: [\n", "is not YAML"),
        ("[" * 700, "is not YAML"),
        ("comment: \xff\n", "is not YAML"),
    ],
)
def test_a_wrong_site_file_is_one_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message) as raised:
        from_site(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_further_options_of_sbatch(tmp_path: Path):
    found = from_site(
        tmp_path, "sbatch: {reservation: day1, licenses: a}\n", sbatch=[("reservation", "day2"), ("exclusive", "")]
    )
    assert found.sbatch == {"reservation": "day2", "licenses": "a", "exclusive": ""}
    assert resolve.resolve(json.loads(json.dumps(asdict(found)))) == found  # from a run folder's record


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--reservation=x", "is not an option of sbatch"),
        ("time=5", "--sbatch time is set by the launcher"),
        ("signal=B:USR1", "--sbatch signal is set by the launcher"),
        ("comment2=a\nb", "--sbatch holds a line break"),
    ],
)
def test_options_of_sbatch_that_cannot_be(word: str, message: str):
    with pytest.raises(UserError, match=message):
        resolve.resolve({"cluster": "slurm", "sbatch": [word.partition("=")[::2]]})


def test_options_of_sbatch_are_refused_on_this_machine():
    with pytest.raises(UserError, match="--sbatch is for SLURM jobs"):
        resolve.resolve({"cluster": "local", "gpus": 0, "sbatch": [("exclusive", "")]})


def spec(stage: str, **given: object) -> StageSpec:
    return StageSpec(stage, "/runs/x", "a:b", **given)  # type: ignore[arg-type]


def test_a_stage_has_options_of_its_own(tmp_path: Path):
    text = (
        "partition: gpu\ngpus: 8\nsbatch: {licenses: a}\n"
        "stages: {convert: {partition: cpu, time: 0:30:00, sbatch: {qos2: low}}, report: {gpus: 1}}\n"
    )
    asked = from_site(tmp_path, text)
    convert = asked.fitting(spec("convert", one_process=True, gpu=False))
    assert (convert.partition, convert.minutes, convert.gpus_per_node) == ("cpu", 30, 0)
    assert convert.sbatch == {"licenses": "a", "qos2": "low"}
    assert convert.fitting(spec("convert", one_process=True, gpu=False)) == convert
    report = asked.fitting(spec("report", one_process=True, gpu=False))  # for partitions that refuse jobs without GPUs
    assert (report.partition, report.gpus_per_node, report.tasks_per_node) == ("gpu", 1, 1)
    assert asked.fitting(spec("pretrain")) == replace(asked, cpus_per_task=1)


def test_a_slurm_job_gets_a_core_per_worker_and_one():
    pretraining, asked = spec("pretrain", config="DATALOADER: {NUM_WORKERS: 8}"), Options(cluster="slurm")
    assert [asked.fitting(one).cpus_per_task for one in (pretraining, spec("report"))] == [9, 1]
    assert replace(asked, cpus_per_task=6).fitting(pretraining).cpus_per_task == 6
    assert Options(cluster="local").fitting(pretraining).cpus_per_task is None


def test_programs_that_do_not_answer_are_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    def silent(
        command: list[str], *, timeout: float, **_given: object
    ) -> None:  # a call without a limit is a TypeError
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(slurm.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(options.subprocess, "run", silent)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resolve.resolve({"cluster": "slurm", "partition": "gpu"}).partition == "gpu"
    options._device_count.cache_clear()
    with pytest.raises(UserError, match=r"torch cannot count the GPUs .*name them in CUDA_VISIBLE_DEVICES"):
        options.visible_gpus()


def test_torch_counts_the_gpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The machine's nvidia-smi fails, as after a GPU fell off the bus; torch still sees two."""
    (tmp_path / "torch.py").write_text(
        "import pathlib\npathlib.Path('asked').open('a').write('x')\n"
        "class cuda: device_count = staticmethod(lambda: 2)\n"
    )
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options._device_count.cache_clear()
    assert [options.visible_gpus(), Options(cluster="local").gpus_per_node] == [["0", "1"], 2]
    assert Path("asked").read_text() == "x"
    options._device_count.cache_clear()


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("0:30", 1), ("90:30", 91), ("4:00:00", 240), ("1-0", 1440), ("2-03:04:05", 3065), ("1-0:30", 1470)],
)
def test_times(text: str, minutes: int):
    assert options.parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "4h", "-5", "0", "1:2:3:4", "0:00:00"])
def test_times_that_are_none(text: str):
    with pytest.raises(UserError, match="--time"):
        options.parse_minutes(text)


def test_command_line_wins_over_the_sites_file(tmp_path: Path):
    site = tmp_path / "cluster.yaml"
    site.write_text("partition: gpu\naccount: 42\ncpus-per-task: 8\nsetup: module load cuda\n")
    found = resolve.resolve({"cluster": "slurm", "cpus_per_task": 3}, str(site))
    assert (found.partition, found.account, found.cpus_per_task) == ("gpu", "42", 3)
    site.write_text("partitoin: gpu\n")
    with pytest.raises(UserError, match=r"unknown key partitoin.*did you mean 'partition'"):
        resolve.resolve({"cluster": "local"}, str(site))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"gpus": -1}, "--gpus is -1"),
        ({"comment": "a\nb"}, "--comment holds a line break"),
        ({"time": "1", "signal_delay": 60, "cluster": "slurm"}, "--signal-delay 60 s is not shorter"),
        ({"time": "1"}, r"--time is for SLURM jobs.*timeout\(1\)"),
        ({"gpus": 64}, "--gpus 64, but"),
    ],
)
def test_values_that_cannot_work(given: dict, message: str):
    with pytest.raises(UserError, match=message):
        resolve.resolve({"cluster": "local", **given})


@pytest.mark.parametrize(("parallel", "gpus"), [(None, 4), (2, 2), (4, 1), (8, 1)])
def test_stages_that_run_at_the_same_time_divide_the_gpus(monkeypatch: pytest.MonkeyPatch, parallel: int, gpus: int):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert Options(cluster="local", parallel=parallel).gpus_per_node == gpus


def test_visible_gpus_keep_the_users_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab12")
    assert options.visible_gpus() == ["3", "GPU-ab12"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert options.visible_gpus() == []


@pytest.mark.parametrize(("gpus", "kept"), [(4, 1), (1, 1), (0, 0)])
def test_a_stage_of_one_process_keeps_one_gpu_if_it_has_use_for_it(gpus: int, kept: int):
    asked = Options(cluster="slurm", nodes=2, gpus=gpus)
    ours = stages.distributions(["runs/a", "runs/b"])
    fitting = asked.fitting(ours)
    assert (fitting.nodes, fitting.tasks_per_node, fitting.gpus_per_node) == (1, 1, kept)
    assert asked.fitting(stages.convert("runs/a", "a.pth")).gpus_per_node == 0


SINFO = r"printf 'gpu*|2:00:00|2\nlong|infinite|1\nlong|infinite|3\n'"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"partition": "lnog"}, "no partition 'lnog' on this cluster (it has gpu, long); did you mean 'long'?"),
        ({"time": "2:01:00"}, "--time 121 minutes is above partition gpu's limit of 2:00:00"),
        ({"partition": "long", "nodes": 5}, "--nodes 5, but partition long has 4"),
    ],
)
def test_a_partition_that_cannot_take_the_job_is_refused_before_sbatch(tmp_path, monkeypatch, asked, message):
    programs(monkeypatch, tmp_path, "/usr/bin:/bin", sinfo=SINFO)
    with pytest.raises(UserError) as raised:
        resolve.resolve({"cluster": "slurm", **asked})
    assert message in str(raised.value)


@pytest.mark.parametrize("sinfo", ["exit 1", "echo '<html>Bad gateway</html>'", r"printf '\377|x\n'", "echo 'a|b|c|d'"])
def test_a_scheduler_that_fails_or_talks_nonsense_refuses_no_partition(tmp_path, monkeypatch, sinfo):
    programs(monkeypatch, tmp_path, "/usr/bin:/bin", sinfo=sinfo)
    assert resolve.resolve({"cluster": "slurm", "partition": "any"}).partition == "any"


def test_a_site_file_is_for_slurm_jobs(tmp_path: Path):
    text = "nodes: 2\ngpus: 64\ntime: 4:00:00\nsetup: module load cuda\nsbatch: {reservation: day1}\n"
    assert from_site(tmp_path, text, cluster="local") == Options(cluster="local")


@pytest.mark.parametrize(("job", "cluster"), [("", "slurm"), ("7", "local")])
def test_auto_uses_the_allocation_that_it_is_in(monkeypatch: pytest.MonkeyPatch, job: str, cluster: str):
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert resolve.resolve({}).cluster == cluster
