"""A mistake on a command line is answered before torch is imported, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAF = str(ROOT / "configs" / "coco_R50_FPN_1x_jcl.yaml")
# Runs a file as the command line does, and lists the large libraries that it has imported.
SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("imported:", *({"torch", "torchvision"} & sys.modules.keys()))
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(ROOT / words[0]), *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tools/convert_to_d2.py", "nowhere.pth", "out.pth"), "no run folder or checkpoint at nowhere.pth"),
        (("tools/convert_to_d2.py", LEAF, "out.txt"), "must end in .pth"),
        (("transfer/train_net.py", "--config-file", "nowhere.yaml"), "no config file at nowhere.yaml"),
        (("transfer/train_net.py", "--config-file", LEAF, "SOLVER.BASE_LRR", "1"), "did you mean 'SOLVER.BASE_LR'?"),
        (("transfer/train_net.py", "--config-file", LEAF, "--num-gpus", "0"), "at least 1 process"),
        (("tools/launch.py", "pretrain", "--method", "foo"), "no default recipe for --method foo"),
        (("tools/launch.py", "pretrain", "--method", "jcl", "METHOD.K1", "2.0"), "METHOD.K1"),
        (("tools/launch.py", "transfer", "--config-file", "nowhere.yaml"), "no config file at nowhere.yaml"),
        (("tools/benchmark.py", "views", "--views", "0"), "--views is 0"),
        (("tools/show_views.py", "--recipe", "moco_v3", "--data", "x"), "did you mean 'moco_v"),
        (("tools/make_data.py", "digits", "x", "--size", "1"), "--size is 1"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_answered_without_torch(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "imported:\n") and message in done.stderr, done
