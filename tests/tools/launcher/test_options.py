"""The options of a job: the site's file, what a stage gets, times, and values that cannot work."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tools.launcher import options, slurm, stages
from tools.launcher.options import Options, resolve
from tools.launcher.spec import StageSpec


@pytest.fixture(autouse=True)
def no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def from_site(text: str, **given: object) -> Options:
    Path("cluster.yaml").write_text(text)
    return resolve({"cluster": "slurm", **given}, "cluster.yaml")


def test_a_sites_values_have_their_types_and_the_command_line_wins():
    text = (
        "account: 0042\ngpus: 4\nmax-timeouts: 0\npartition: on\ntime: 4:00:00\nsbatch: {reservation: day1, qos: a}\n"
        "setup: |\n  module load cuda\n  export A=b\n"
    )
    read = from_site(text, gpus=3, sbatch=[("reservation", "day2"), ("exclusive", "")])
    assert (read.account, read.gpus, read.max_timeouts, read.partition) == ("0042", 3, 0, "on")
    assert (read.minutes, read.setup) == (240, ("module load cuda", "export A=b"))
    assert read.sbatch == {"reservation": "day2", "qos": "a", "exclusive": ""}
    assert resolve(json.loads(json.dumps(asdict(read)))) == read  # from a run folder's record
    assert from_site(text, cluster="local") == Options(cluster="local")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: gpu\n", r"unknown option partitoin.*did you mean 'partition'"),
        ("gpus: four\n", r"gpus in .* is 'four'; it must be a whole number"),
        ("max-timeouts: -1\n", "max_timeouts in .* is '-1'; it must be a whole number"),
        ("partition: [gpu]\n", r"partition in .* is \['gpu'\]; it must be text"),
        ("sbatch: qos=a\n", "sbatch in .* is 'qos=a'; it must be 'option: value' lines"),
        ("setup: [a, b: c]\n", r"setup in .* must be shell lines"),
        ("sbatch: {constraint: [a]}\n", "sbatch in .* must be 'option: value' lines"),
        ("gpus: 4\ngpus: 8\n", "cluster.yaml .*gpus occurs twice, in lines 1 and 2"),
        ("- a\n", "must hold 'option: value' lines"),
    ],
)
def test_a_wrong_site_file_is_one_line(text: str, message: str):
    with pytest.raises(UserError, match=message) as raised:
        from_site(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"time": "4h"}, "--time '4h' is not a time; write minutes, H:MM:SS or D-HH:MM:SS"),
        ({"time": "0:00:00"}, r"--signal-delay 120 s is not shorter than --time \(0 minutes\)"),
        ({"sbatch": [("time", "5")]}, "--sbatch time is set by the launcher"),
        ({"cluster": "local", "sbatch": [("exclusive", "")]}, "--sbatch is for SLURM jobs"),
        ({"cluster": "local", "time": "1"}, r"--time is for SLURM jobs.*timeout\(1\)"),
        ({"cluster": "local", "gpus": 64}, "--gpus 64, but"),
        ({"cluster": "local", "nodes": 2}, "--nodes 2 needs --cluster slurm"),
    ],
)
def test_values_that_cannot_work(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=message):
        resolve({"cluster": "slurm", **given})


def spec(stage: str, **given: Any) -> StageSpec:
    return StageSpec(stage, "/runs/x", "a:b", **given)


def test_a_stage_gets_the_processes_and_gpus_that_it_has_use_for():
    asked = Options(cluster="slurm", nodes=2, gpus=8, partition="gpu", cpu_partition="cpu")
    convert = asked.fitting(stages.convert("runs/a", "a.pth"))
    assert (convert.partition, convert.nodes, convert.gpus_per_node, convert.tasks_per_node) == ("cpu", 1, 0, 1)
    assert replace(asked, cpu_partition="").fitting(stages.convert("runs/a", "a.pth")).partition == "gpu"
    assert asked.fitting(spec("pretrain")) == replace(asked, cpus_per_task=1)
    for gpus, left in ((4, 1), (0, 0)):
        fitting = Options(cluster="slurm", nodes=2, gpus=gpus).fitting(stages.distributions(["runs/a", "runs/b"]))
        assert (fitting.nodes, fitting.tasks_per_node, fitting.gpus_per_node) == (1, 1, left)


def test_a_slurm_job_gets_a_core_per_worker_and_one():
    pretraining, asked = spec("pretrain", config="DATALOADER: {NUM_WORKERS: 8}"), Options(cluster="slurm")
    assert [asked.fitting(stage).cpus_per_task for stage in (pretraining, spec("report"))] == [9, 1]
    assert replace(asked, cpus_per_task=6).fitting(pretraining).cpus_per_task == 6
    assert Options(cluster="local").fitting(pretraining).cpus_per_task is None


def test_torch_counts_the_gpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch.py").write_text(
        "import pathlib\npathlib.Path('asked').open('a').write('x')\n"
        "class cuda: device_count = staticmethod(lambda: 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options._device_count.cache_clear()
    assert [options.visible_gpus(), Options(cluster="local").gpus_per_node] == [["0", "1"], 2]
    assert Path("asked").read_text() == "x"
    options._device_count.cache_clear()
    (tmp_path / "torch.py").write_text("raise OSError('libcuda.so is missing')")
    with pytest.raises(UserError, match=r"torch cannot count the GPUs .*libcuda.*name them in CUDA_VISIBLE_DEVICES"):
        options.visible_gpus()


def test_times():
    assert [options.parse_minutes(text) for text in ("30", "4:00:00", "2-03:04:05")] == [30, 240, 3065]


def test_stages_that_run_at_the_same_time_divide_the_visible_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3,GPU-ab12")
    assert options.visible_gpus() == ["0", "1", "3", "GPU-ab12"]
    counts = [Options(cluster="local", parallel=parallel).gpus_per_node for parallel in (None, 2, 4, 8)]
    assert counts == [4, 2, 1, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert options.visible_gpus() == []


@pytest.mark.parametrize(("job", "cluster"), [("", "slurm"), ("7", "local")])
def test_auto_uses_the_allocation_that_it_is_in(monkeypatch: pytest.MonkeyPatch, job: str, cluster: str):
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert resolve({}).cluster == cluster
