"""The options of a job: what each stage gets, times, and where jobs run."""

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from pretrain.common import gpus
from pretrain.common.config.yaml_io import dump
from pretrain.config import default_config
from tests.errors import refused
from tests.tools.launcher.fake_stages import FakeAlone
from tests.tools.launcher.helpers import build_convert, from_site
from tools.launcher import time_limits
from tools.launcher.job_options import JobOptions, resolve_options
from tools.stages.linear import Linear
from tools.stages.pretrain import Pretrain

pytestmark = pytest.mark.usefixtures("programs")  # of which there are none: no scheduler


CONVERT = build_convert("runs/a", "a.pth")
ON_ONE_GPU = FakeAlone("/runs/x")
PRETRAIN = Pretrain("/runs/x")
LINEAR = Linear("/runs/x", config=dump(default_config()))


def test_a_stage_gets_the_processes_and_gpus_that_it_has_use_for():
    asked = JobOptions(cluster="slurm", nodes=2, gpus=8, partition="gpu", cpu={"partition": "cpu"})
    convert = asked.for_stage(CONVERT)
    assert (convert.partition, convert.nodes, convert.gpus, convert.tasks) == ("cpu", 1, 0, 1)
    assert replace(asked, cpu={}).for_stage(CONVERT).partition == "gpu"
    for count, used in ((4, 1), (0, 0)):
        resources = replace(asked, gpus=count).for_stage(ON_ONE_GPU)
        assert (resources.nodes, resources.tasks, resources.gpus) == (1, 1, used)
    assert JobOptions(cluster="local").for_stage(PRETRAIN).cpus_per_task is None


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("", [240, 240, 30]),
        ("2:00:00", [120, 120, 30]),
        ("24:00:00", [1440, 240, 30]),
        ("1-0,linear=8:00:00,convert=60", [1440, 480, 60]),
        ("linear=10", [240, 10, 30]),
        ("UNLIMITED", [time_limits.UNLIMITED, 240, 30]),
    ],
)
def test_a_pipelines_stages_get_the_time_that_they_need(time: str, minutes: list[int]):
    asked = resolve_options({"cluster": "slurm", "time": time, "gpus": 8})
    stages = (PRETRAIN, LINEAR, CONVERT)
    assert [asked.for_stage(stage).minutes for stage in stages] == minutes
    alone = [asked.assign_time(stage.name).for_stage(stage).minutes for stage in stages]  # what was asked for
    assert alone == [minutes[0] if name not in time else own for name, own in zip(NAMES, minutes, strict=True)]


@pytest.mark.parametrize(
    ("nodes", "gpus", "epochs", "minutes"),
    [(1, 8, 100, 240), (1, 1, 100, 1920), (1, 4, 100, 480), (2, 8, 100, 240), (2, 2, 50, 240), (1, 1, 10, 240)]
    + [(1, 0, 100, 2880)],  # CPUs: all of --time
)
def test_a_linear_probe_gets_more_time_on_fewer_gpus(nodes: int, gpus: int, epochs: int, minutes: int):
    asked = resolve_options({"cluster": "slurm", "time": "2-0", "nodes": nodes, "gpus": gpus})
    cfg = default_config()
    cfg.LINEAR.EPOCHS = epochs
    assert asked.for_stage(replace(LINEAR, config=dump(cfg))).minutes == minutes


@pytest.mark.parametrize(("time", "delay"), [("1:00:00", 120), ("1:30", 60), ("3", 90), ("5", 120)])
def test_a_checkpoint_is_requested_no_earlier_than_half_of_the_limit(time: str, delay: int):
    """A stage with a short limit of its own gets less notice, and leaves that of the others alone."""
    asked = resolve_options({"cluster": "slurm", "time": f"1-0,convert={time},pretrain={time}"})
    assert [asked.for_stage(stage).signal_delay for stage in (PRETRAIN, LINEAR, CONVERT)] == [delay, 120, delay]


NAMES = ("pretrain", "linear", "convert")
WORDS = """\
time: 2-03:04:05
account: abc
sbatch: {qos: a100, mem: 400G, gres: 'gpu:a100:8,scratch:9', gpu-bind: closest, mail-type: FAIL}
"""
SITE = """\
partition: gpu
account: 'abc@a100'
time: 20:00:00
sbatch: {qos: long, constraint: a100}
cpu: {partition: prepost, time: '2:00:00', account: 'abc@cpu', qos: short, gres: none}
"""
# The site file, and minutes, account, partition and further options of a stage without a GPU.
CPU_STAGES = {
    "the same nodes": (
        f"partition: gpu\n{WORDS}",
        (30, "abc", "gpu", {"qos": "a100", "mem": "400G", "mail-type": "FAIL"}),
    ),
    "CPU nodes": (f"cpu: {{partition: cpu}}\n{WORDS}", (30, "abc", "cpu", {"mail-type": "FAIL"})),
    "a short limit": ("time: 10\nsignal-delay: 250\n", (10, "", "", {})),
    "a block": (SITE, (120, "abc@cpu", "prepost", {"qos": "short", "gres": "none"})),
}


@pytest.mark.parametrize("case", CPU_STAGES)
def test_stages_without_a_gpu_inherit_only_what_fits_them(case: str):
    site, expected = CPU_STAGES[case]
    asked = from_site(site, gpus=0)
    convert = asked.for_stage(CONVERT)
    assert (convert.minutes, convert.account, convert.partition, convert.sbatch) == expected
    assert convert.signal_delay < 60 * convert.minutes and convert.gpus == 0
    trained = asked.for_stage(PRETRAIN)
    assert (trained.partition, trained.sbatch) == (asked.partition, asked.sbatch)
    assert (trained.cpus_per_task, trained.signal_delay, trained.request) == (1, asked.signal_delay, asked)


def test_gpus_can_have_a_type():
    assert from_site("gpus: gpu:4\n").gpus == 4 and from_site("gpus: gpu:v100:4\n").gpus == "v100:4"  # as in gres
    asked = from_site("gpus: a100_3g.20gb:8\n", time="2:00:00")
    stages = (PRETRAIN, ON_ONE_GPU, CONVERT)
    fitted = [asked.for_stage(stage) for stage in stages]
    assert [resources.describe_gpus() for resources in fitted] == ["a100_3g.20gb:8", "a100_3g.20gb:1", "0"]
    assert [resources.tasks for resources in fitted] == [8, 1, 1]


def test_a_job_records_the_cluster_of_the_shell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "alex")
    assert resolve_options({"cluster": "slurm"}).sbatch == {"clusters": "alex"}
    assert resolve_options({"cluster": "slurm", "sbatch": [("clusters", "fritz")]}).sbatch == {"clusters": "fritz"}
    assert resolve_options({"cluster": "local"}).sbatch == {}
    monkeypatch.setenv("SLURM_CLUSTERS", "alex,fritz")
    refused(lambda: resolve_options({"cluster": "slurm"}), "clusters=alex,fritz (or SBATCH_CLUSTERS,", "choose one")


@pytest.mark.parametrize(
    ("cluster", "parallel", "number"), [("local", None, 1), ("local", 2, 2), ("slurm", None, 8), ("slurm", 3, 3)]
)
def test_stages_run_one_by_one_here_and_eight_at_once_on_slurm(cluster: str, parallel: int | None, number: int):
    options = JobOptions(cluster=cluster, parallel=parallel, gpus=0)
    assert options.num_parallel == options.for_stage(PRETRAIN).parallel == number


def test_stages_that_run_at_the_same_time_divide_the_visible_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3,GPU-ab12")
    assert gpus.list_visible_gpus() == ["0", "1", "3", "GPU-ab12"]
    counts = [JobOptions(cluster="local", parallel=parallel).count_gpus() for parallel in (None, 2, 8)]
    assert counts == [4, 2, 1]
    assert [JobOptions(cluster="local", tasks=tasks).count_gpus() for tasks in (3, 8)] == [3, 4]
    for variable, visible in {
        "-1": [],
        "NoDevFiles": [],
        "": [],
        "1, 0,-1,2": ["1", "0"],
        "MIG-a/1": ["MIG-a/1"],
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert gpus.list_visible_gpus() == visible


@pytest.mark.parametrize(
    ("sinfo", "cluster"),
    [
        (None, "local"),
        ("echo up", "slurm"),
        ("echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1", "local"),
        ("echo Unable to contact slurm controller >&2; exit 1", ""),
    ],
)
def test_auto_is_slurm_where_it_answers(programs: Callable, monkeypatch, sinfo: str | None, cluster: str):
    monkeypatch.setenv("SLURM_JOB_ID", "")  # as unset
    programs(**({} if sinfo is None else {"sinfo": sinfo, "sbatch": ""}))
    if cluster:
        assert resolve_options({}).cluster == cluster
    else:
        refused(lambda: resolve_options({}), "does not answer (Unable to contact", "--cluster slurm", "--cluster local")


HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("nodes", "name", "is_here"),
    [
        (f"{HOST}.cluster.org", "", True),
        (f"node[1-3],{HOST}", "", True),
        ("n[1-3,07]", "n07", True),
        ("n[1-3,07]", "n4", False),
        ("n[", "", False),
    ],
)
def test_auto_uses_the_allocation_that_this_machine_is_in(monkeypatch, capsys, nodes: str, name: str, is_here: bool):
    for variable, value in {"SLURM_JOB_ID": "99", "SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": name}.items():
        monkeypatch.setenv(variable, value)
    if is_here:
        assert resolve_options({}).cluster == "local"
        assert capsys.readouterr().err == f"inside allocation 99; running on this machine ({HOST})\n"
    else:  # a login node, or a job that has ended
        refused(lambda: resolve_options({}), "SLURM_JOB_ID is 99", HOST, "--cluster slurm", "--cluster local")
    assert [resolve_options({"cluster": cluster}).cluster for cluster in ("slurm", "local")] == ["slurm", "local"]


def test_a_single_process_gets_none_of_the_nodes_that_the_others_share():
    asked = JobOptions(cluster="slurm", nodes=2, sbatch={"nodelist": "a,b", "qos": "long"})
    for stage in (CONVERT, ON_ONE_GPU):
        assert asked.for_stage(stage).sbatch == {"qos": "long"} and asked.for_stage(stage).nodes == 1
        assert replace(asked, nodes=1).for_stage(stage).sbatch == asked.sbatch
    assert asked.for_stage(PRETRAIN).sbatch == asked.sbatch
