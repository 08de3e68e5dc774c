"""What a process is told about its place among the ranks of a run, by torchrun, the launcher or SLURM: its environment.

It is known before the process has joined a process group, from which `distributed` answers.
"""

import os


def build_rank_environment(rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them."""
    sizes = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in sizes.items()}


def is_rank() -> bool:
    """Return whether this process is a rank that another program has started."""
    return "RANK" in os.environ


def is_first_process() -> bool:
    """Return whether this process is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


def read_world_size() -> int:
    """Return the number of processes of this run: 1 if this one is no rank."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_cores_per_process() -> int:
    """Return the number of CPU cores that each of a job's processes on this machine has: SLURM's, or an equal share."""
    per_task = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(per_task) if per_task else max(1, count_usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
