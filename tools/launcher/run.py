"""Shows one stage, runs it on this machine with its output on the terminal, or submits it to SLURM."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from pretrain.common import interrupt

from . import attach, control
from .job import StageJob
from .options import Options
from .spec import StageSpec
from .submit import preview, submit

# What a stage is usually followed by.
_NEXT = {
    "pretrain": "next: python tools/convert_to_d2.py {folder} weights/{name}.pth\n"
    "or:   python tools/launch.py knn {folder}",
    "transfer": "next: python tools/launch.py report {folder}",
}


class StageFailed(Exception):
    """A stage ended with an error; the text is the first failing rank's, ``status`` the command line's exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def run_stage(spec: StageSpec, options: Options) -> int:
    """Runs a stage as a command line does; returns the exit status."""
    is_here = options.cluster != "slurm"
    try:
        with interrupt.handled() if is_here else contextlib.nullcontext():
            execute(spec, options)
    except StageFailed as failure:
        print(str(failure), file=sys.stderr)
        return failure.status
    except attach.Interrupted as stop:
        print(f"{stop}\nrun the same command again to continue", file=sys.stderr)
        return 130
    if is_here and spec.stage in _NEXT:
        folder = os.path.relpath(spec.folder)
        print(_NEXT[spec.stage].format(folder=shlex.quote(folder), name=shlex.quote(Path(folder).name)))
    return 0


def execute(spec: StageSpec, options: Options) -> None:
    """Starts a stage; on this machine waits for its end.

    Raises:
        StageFailed: it ended with an error. attach.Interrupted: the user ended it.
    """
    options = options.fitting(spec)
    folder = Path(spec.folder)
    if options.cluster == "debug":
        StageJob(spec).run()
        return
    (job,) = submit([spec], options)
    if options.cluster == "slurm":
        print(f"{spec.stage}: SLURM job {job.job_id}, run folder {folder}")
        print(f"to follow it: python tools/launch.py logs --follow {shlex.quote(str(folder))}")
        return
    with attach.Terminal() as terminal:
        terminal.add(spec.folder, folder, job)
        _, last = terminal.wait()
    if "interrupted" in last:
        raise attach.Interrupted(last["interrupted"])
    raise_if_not_done(spec, last)


def raise_if_not_done(spec: StageSpec, last: dict[str, Any]) -> None:
    """Raises StageFailed if rank 0's ``last`` record (see `attach.Terminal.wait`) is not that of a complete stage."""
    folder = spec.folder
    if last["state"] == "done":
        return
    failure = last.get("failure", {})
    if not failure:
        reason = last.get("reason") or control.silent_end(Path(folder))
        raise StageFailed(
            f"{spec.stage} in {folder} {last['state']}: {reason}; run the same command again to resume", 1
        )
    if failure["user_error"]:
        raise StageFailed(f"error: {failure['error']}", 2)
    text = failure["traceback"] or failure["error"]
    raise StageFailed(
        f"{text.rstrip()}\n{spec.stage} in {folder} failed on rank {failure['rank']} ({failure['host']})", 1
    )


def show(spec: StageSpec, options: Options) -> None:
    """What would be submitted: the script or command."""
    print(f"# {spec.stage} -> {spec.folder}")
    print(preview(spec, options.fitting(spec)))
