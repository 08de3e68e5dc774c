"""The file of a job, which the launcher writes and each of the job's processes reads: the stage, and SLURM's limits."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.common.files import read_json, write_json
from tools.stages.base import Stage


@dataclass(frozen=True)
class Limits:
    """The limits of a SLURM job.

    Attributes:
        minutes: time limit of an attempt.
        timeouts: requeues after a time limit that are left.
        patience_s: seconds from the signal to a requeue even if the stage has not stopped by then.
    """

    minutes: int
    timeouts: int
    patience_s: float

    def count_timeout(self, elapsed_s: float) -> "Limits":
        """Return what is left after an attempt that was asked to stop; a preemption comes before its limit is near."""
        limit_s = self.minutes * 60
        is_timeout = elapsed_s >= min(limit_s * 0.8, limit_s - 600)
        return replace(self, timeouts=self.timeouts - is_timeout)


def name_job_file(logs: Path, index: int | str = 0) -> Path:
    """Return the file of a job that writes to ``logs``, or of an array's job with this ``index``."""
    return logs / f"spec_{index}.json"


def write_job(file: Path, stage: Stage, limits: Limits | None = None) -> None:
    """Write the file of a job, whose path each of its processes gets; only one of SLURM has limits."""
    write_json(file, {"spec": stage.to_json(), "limits": asdict(limits) if limits else {}})


def read_job(file: Path) -> dict[str, Any]:
    """Read the file of a job: its stage, and its limits, if it is one of SLURM.

    A job of SLURM imports the copy of the code that wrote its file. A launcher on this machine may have been started
    by an earlier version, which wrote the stage alone.
    """
    record = read_json(file)
    return record if "spec" in record else {"spec": record, "limits": {}}
