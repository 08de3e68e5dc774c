"""What the job of one stage gets, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job_options import JobOptions


@dataclass(frozen=True)
class Resources:
    """The resources of a job (`JobOptions.for_stage`): all that it depends on, so that jobs can be compared by it.

    Therefore it repeats the options that apply to every stage as they are.

    Attributes:
        tasks, gpus: numbers per node.
        gpu_type: empty if the site asks for none.
        parallel: stages, or jobs of an array, that run at the same time.
        sbatch, srun: further options without their dashes; an empty value is a flag.
        request: what the user asked for, which the record of the job keeps for `resume`; it is not compared.
        is_on_cpu_nodes: whether the site file places the stage on other nodes than those with GPUs.
    """

    cluster: str
    nodes: int
    tasks: int
    gpus: int
    gpu_type: str
    cpus_per_task: int | None
    partition: str
    account: str
    minutes: int
    max_timeouts: int
    signal_delay: int
    parallel: int
    sbatch: dict[str, str]
    srun: dict[str, str]
    python: str
    setup: tuple[str, ...]
    request: JobOptions = field(compare=False)
    is_on_cpu_nodes: bool = False

    def describe_gpus(self) -> str:
        """Return the GPUs per node as sbatch takes them, ``a100:2``."""
        return f"{self.gpu_type}:{self.gpus}" if self.gpu_type else str(self.gpus)
