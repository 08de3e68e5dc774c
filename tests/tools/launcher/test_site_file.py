"""The site file: its values, what takes precedence over them, and mistakes in it."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.errors import refused
from tests.tools.launcher.helpers import ROOT, build_convert, from_site
from tools.launcher.execution.submit import preview_script
from tools.launcher.job_options import JobOptions, from_record, resolve_options
from tools.stages.pretrain import Pretrain

pytestmark = pytest.mark.usefixtures("programs")  # of which there are none: no scheduler


def test_a_sites_values_have_their_types_and_the_command_line_wins():
    text = (
        "account: 0042\ngpus: 4\nmax-timeouts: 0\npartition: on\ntime: 4:00:00\nsbatch: {reservation: day1, qos: a}\n"
        "setup: |\n  module load cuda\n  export A=b\n"
    )
    read = from_site(text, gpus=3, sbatch=[("reservation", "day2"), ("exclusive", "")])
    assert (read.account, read.gpus, read.max_timeouts, read.partition) == ("0042", 3, 0, "on")
    assert (read.time, read.setup) == ("4:00:00", ("module load cuda", "export A=b"))
    assert read.sbatch == {"reservation": "day2", "qos": "a", "exclusive": ""}
    assert from_site("sbatch: {exclusive: yes, requeue_x: false, overcommit: no}\n").sbatch == {"exclusive": ""}
    assert from_site("srun: {overlap: true}\n").srun == {"overlap": ""}
    assert from_record(json.loads(json.dumps(asdict(read)))) == read  # from a run folder's record
    config = Path("config/pretrain-to-transfer")
    config.mkdir(parents=True)
    Path("cluster.yaml").rename(config / "cluster.yaml")
    assert resolve_options({"cluster": "local"}) == JobOptions(cluster="local")  # the site's values are for SLURM


def test_without_a_home_there_is_no_site_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)  # has no entry in passwd
    assert resolve_options({"cluster": "slurm"}) == JobOptions(cluster="slurm")


def test_a_site_file_whose_target_is_gone_is_refused():
    config = Path("config/pretrain-to-transfer")
    config.mkdir(parents=True)
    (config / "cluster.yaml").symlink_to("/scratch/gone.yaml")
    refused(lambda: resolve_options({"cluster": "slurm"}), "no site file at", config / "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: gpu\n", r"unknown option partitoin.*did you mean 'partition'"),
        (
            "qos: long\n",
            "unknown option qos in cluster.yaml; pass it to sbatch: .* sbatch: {qos: VALUE} in the site file",
        ),
        (
            "ntasks_per_node: 4\n",
            r"unknown option ntasks_per_node in cluster.yaml; use --tasks \(in the site file tasks\)",
        ),
        ("job-name: a\n", "unknown option job_name in cluster.yaml; jobs are named after their folders"),
        ("q: long\n", "unknown option q in cluster.yaml; pass it to sbatch: --sbatch qos=VALUE"),
        ("N: 2\n", r"unknown option N in cluster.yaml; use --nodes \(in the site file nodes\)"),
        ("cpu-partition: a\n", "unknown option cpu_partition in .*cluster.yaml; .* as cpu: {partition: NAME}"),
        ("gpus: four\n", r"--gpus 'four' is neither a number nor TYPE:NUMBER.* \(the site file is .*cluster.yaml\)"),
        ("max-timeouts: none\n", "max_timeouts in .* is 'none'; it must be a whole number"),
        ("max-timeouts: -1\n", "--max-timeouts is -1; it must be at least 0"),
        ("partition: [gpu]\n", r"partition in .* is \['gpu'\]; it must be a single value"),
        ("gpus:\n", "--gpus '' is neither a number nor TYPE:NUMBER"),
        ("sbatch: qos=a\n", "sbatch in .* is 'qos=a'; it must be 'option: value' lines"),
        ("setup: [a, b: c]\n", r"setup in .* must be shell lines"),
        ("sbatch: {constraint: [a]}\n", "sbatch in .* must be 'option: value' lines"),
        ("gpus: 4\ngpus: 8\n", "cluster.yaml .*gpus occurs twice, on lines 1 and 2"),
        ("- a\n", "must contain 'option: value' lines"),
        ("cpu: {time: [5]}\n", "cpu in .* must be 'option: value' lines"),
        ("cpu: {time: 4h}\n", "cpu: time '4h' is not a time"),
        ("cpu: {cpus-per-task: 4}\n", "cpu: cpus-per-task is set by the launcher"),
        ("sbatch: {mem: 1G, mem-per-cpu: 1G}\n", "sbatch in cluster.yaml: mem and mem-per-cpu exclude each other"),
    ],
)
def test_a_wrong_site_file_is_one_line(text: str, message: str):
    assert re.search(message, refused(lambda: from_site(text)))


CONVERT = build_convert("runs/a", "a.pth")
PRETRAIN = Pretrain("/runs/x")
SITES = {
    "typed_gpus": "--gpus-per-node=a100:8",
    "gres_only": "--gres=gpu:v100:4",
    "gpu_and_cpu_accounts": "--qos=qos_gpu-t3",
    "memory_per_core": "--mem-per-cpu=4G",
    "whole_nodes": "--exclusive\n",
    "clean_environment": "--clusters=alex",
    "pyxis": "--no-container-mount-home python -u -m tools",
    "apptainer": "pretrain.sif python -u -m tools",
    "node_local_data": "tar -xf /project/data/imagenet.tar -C $NODE_DATA",
    "short_limits": "--signal=USR2@300",
}


def test_the_site_files_of_the_documentation_are_read():
    folder = ROOT / "docs/sites"
    assert sorted(SITES) == sorted(file.stem for file in folder.iterdir())
    for name, line in SITES.items():
        read = resolve_options({"cluster": "slurm"}, str(folder / f"{name}.yaml"))
        pretraining = replace(PRETRAIN, config="DATALOADER: {NUM_WORKERS: 8}")
        scripts = [
            preview_script([stage], read.for_stage(stage), Path("/code"), "") for stage in (pretraining, CONVERT)
        ]
        options = re.sub("(?m)^(?!#SBATCH).*|--partition.*|--(output|error)=.*", "", scripts[1])  # no paths
        assert line in scripts[0] and "gpu" not in options, name
        assert re.search("[Nn]ot (tried )?at any site[.]", (folder / f"{name}.yaml").read_text())
