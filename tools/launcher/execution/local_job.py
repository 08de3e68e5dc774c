"""Starts a stage on this machine, and records the job in launch.json of its run folder; `submit` does so on SLURM."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.common.ranks.parent import Ranks, name_log_folder
from pretrain.common.run.lease import read_start_time
from tools.stages.base import Stage

from ..resources import Resources
from .job import Job
from .job_file import name_job_file, write_job
from .records import record_job


def start_ranks(stage: Stage, resources: Resources, gpus: Sequence[str]) -> Ranks:
    """Start the ranks of a stage on this machine, and record the job; ``gpus`` are the names of its GPUs.

    Raises:
        UserError: the folder cannot be written, or no process can be started.
    """
    logs = name_log_folder(stage.folder)
    file = name_job_file(logs)
    write_job(file, stage)
    variables: dict[str, str] = {}
    if gpus or resources.request.gpus is not None or resources.parallel > 1 or not stage.gpu:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # otherwise the user's own value stays
    if resources.cpus_per_task:
        variables["OMP_NUM_THREADS"] = str(resources.cpus_per_task)
    entry = "tools.launcher.execution.rank_main:run_local_rank"
    words = [str(file)]
    ranks = Ranks(entry, words, resources.tasks, stage.folder, logs, variables=variables, sharing=resources.parallel)
    job = Job(
        folder=Path(stage.folder),
        id=next(iter(ranks.start_times)),  # of rank 0
        cluster="local",
        logs=str(logs),
        host=socket.gethostname(),
        submitted=time.time(),
        processes=ranks.start_times,
        launcher={str(os.getpid()): read_start_time(os.getpid())},
    )
    record_job(stage, resources, job)
    return ranks
