"""Values of options that cannot work."""

import re
from typing import Any

import pytest

from tests.errors import refused
from tools.launcher import format_option
from tools.launcher.job_options import resolve_options

pytestmark = pytest.mark.usefixtures("programs")  # of which there are none: no scheduler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        (
            {"time": "4h"},
            "--time '4h' is not a time; write minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS or UNLIMITED",
        ),
        ({"time": "1:00:00,linaer=4"}, "--time linaer=4 names no stage; choose from pretrain, knn, linear"),
        ({"partition": "a\n#SBATCH --hold"}, r"--partition is 'a.n.*', which contains unprintable characters"),
        ({"sbatch": [("job_name", "a")]}, "--sbatch job-name is set by the launcher"),
        ({"sbatch": [("gpus_per_node", "a100:8")]}, "gpus-per-node is set by the launcher; write --gpus TYPE:NUMBER"),
        ({"sbatch": [("gpus", "8")]}, "gpus is set by the launcher; write --gpus"),
        ({"sbatch": [("gres", "gpu:a100:8")]}, "gres is set by the launcher; write --gpus TYPE:NUMBER.*--gpus 0"),
        (
            {"sbatch": [("gres", "scratch:9,shard:1")]},
            "gres is set by the launcher; write --gpus TYPE:NUMBER.*--gpus 0",
        ),
        (
            {"sbatch": [("gpus-per-task", "1")]},
            "gpus-per-task is set by the launcher; write --gpus TYPE:NUMBER.*--gpus 0",
        ),
        ({"sbatch": [("gpus-per-socket", "1")]}, "gpus-per-socket is set by the launcher; write --gpus"),
        ({"sbatch": [("tres_per_task", "gres/gpu:1")]}, "tres-per-task is set by the launcher; write --gpus"),
        *(({"gpus": text}, f"--gpus {text!r} is neither a number nor TYPE:NUMBER") for text in ("a100", "-1", "a b:1")),
        ({"cluster": "local", "gpus": "a100:1"}, "--gpus a100:1: types are for SLURM"),
        *(
            (
                {"cluster": "local", name: value},
                f"{format_option(name)} is for SLURM jobs.*add --cluster slurm",
            )
            for name, value in (("partition", "a"), ("account", "a"), ("sbatch", [("exclusive", "")]))
        ),
        ({"cluster": "local", "time": "1"}, r"--time is for SLURM jobs.*timeout\(1\)"),
        ({"cluster": "local", "gpus": 64}, "--gpus is 64, but"),
        ({"cluster": "local", "nodes": 2}, "--nodes 2 needs --cluster slurm"),
    ],
)
def test_values_that_cannot_work(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert re.search(message, refused(lambda: resolve_options({"cluster": "slurm", **arguments})))


def test_a_stage_has_one_limit_of_time():
    refused(lambda: resolve_options({"cluster": "slurm", "time": "24:00:00,8:00:00"}), "24:00:00,8:00:00")
    refused(lambda: resolve_options({"cluster": "slurm", "time": "linear=1:00:00,linear=2:00:00"}), "linear")
