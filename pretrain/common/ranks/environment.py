"""What a process is told about its place among the ranks of a run, by torchrun, the launcher or SLURM: its environment.

It is known before the process has joined a process group, from which `distributed` answers.
"""

import os

from ..errors import UserError


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


def read_world_size(default: int = 1) -> int:
    """Return the number of processes of this run, or ``default`` if this one is no rank."""
    return _read_number("WORLD_SIZE", default)


def read_local_world_size(default: int = 1) -> int:
    """Return how many of them are on this machine, or ``default`` if that is not known."""
    return _read_number("LOCAL_WORLD_SIZE", default)


def _read_number(variable: str, default: int) -> int:
    """Return the number in a variable, or ``default`` if it is unset or empty; raise UserError for any other text."""
    text = os.environ.get(variable) or str(default)
    if text.isdecimal():
        return int(text)
    problem = f"the environment variable {variable} is {text!r}, not a number"
    raise UserError(f"{problem}; unset it: torchrun, SLURM and launch.py set it where it is needed")


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_cores_per_process() -> int:
    """Return the number of CPU cores that each of a job's processes on this machine has: SLURM's, or an equal share."""
    return _read_number("SLURM_CPUS_PER_TASK", max(1, count_usable_cores() // read_local_world_size()))
