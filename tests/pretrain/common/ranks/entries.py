"""What the ranks of tests do: importable by a rank, as a stage is."""

import atexit
import os
import time
from pathlib import Path

from pretrain.common.errors import UserError
from pretrain.common.files import json_text
from pretrain.common.interrupt import Stopped
from pretrain.common.run.state import RunContext, record_state

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "SLURM_JOB_ID")


def work(context: RunContext, folder: str) -> None:
    """Print a line, and write this rank's environment."""
    print(f"rank {os.environ['RANK']} of {context.submission}")
    values = {name: os.environ.get(name) for name in _NAMES}
    Path(folder, f"rank.{os.environ['RANK']}").write_text(json_text(values))
    if os.environ["RANK"] == "0":
        with record_state(folder, "knn", context):
            pass


def wait_for_stop(context: RunContext, folder: str) -> None:
    """Wait for a request to stop; rank 0 records how to continue."""
    Path(folder, f"rank.{os.environ['RANK']}").touch()
    while not context.stop.reason:
        time.sleep(0.02)
    stop = Stopped(context.stop.reason, "add --resume")
    if os.environ["RANK"] != "0":
        raise stop
    with record_state(folder, "knn", context):
        raise stop


def fail(_context: RunContext, folder: str, how: str) -> None:
    """Fail on rank 1; rank 0 would wait for an hour."""
    if os.environ["RANK"] == "1":
        if how == "hangs":  # at its exit, as nccl may
            atexit.register(time.sleep, 3600)
        if how == "full":
            (Path(folder) / "failed.1.json").mkdir()
        if how == "killed":
            os.kill(os.getpid(), 9)
        raise UserError("the value is 3; it must be 2") if how in ("mistake", "full") else RuntimeError("a bug")
    time.sleep(3600)
