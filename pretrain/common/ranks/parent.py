"""The ranks of a run on this machine, one process each, started and watched by one parent.

The launcher and `transfer/train_net.py --num-gpus` are such parents. A rank writes its output to two files, and its
error to failed.RANK.json of the run folder. When a rank fails or is killed, the others are killed: they would wait for
it in a collective for minutes.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UserError
from ..files import make_folder
from ..interrupt import Stopped, StopRequest
from ..output import strip_control, survive_lost_output
from ..run import file_names
from ..run.lease import read_start_time
from ..run.state import has_recorded_failure, read_outcome
from ..shell import shorten_paths
from .environment import build_rank_environment, count_usable_cores
from .rank import STOP_REASON, STOPPED, record_failure

POLL_S = 0.2
GRACE_S = 5.0
_OUTER_JOB = ("SLURM_", "SRUN_", "SUBMITIT_")  # variables of a job that this process may be part of
_ROOT = Path(__file__).resolve().parents[3]


class Ranks:
    """The running ranks of a run.

    Args:
        entry: ``package.module:function``, which every rank calls with its `RunContext` and ``words``.
        folder: the run folder.
        logs: a new folder for the output; its name is that of the submission (`name_log_folder`).
        variables: of the ranks' environment, besides those of this process.
        sharing: number of runs of the same size that share this machine's cores.
        grace_s: seconds from one rank's failure to the end of the others, which may be about to report the same.

    Attributes:
        submission: its name, by which records in the run folder name these ranks.
        start_times: when each rank's process was started, by its id, that of rank 0 first.
        exit_error: how a rank has ended that recorded no error itself; empty if none has.
    """

    def __init__(
        self,
        entry: str,
        words: Sequence[str],
        count: int,
        folder: str | Path,
        logs: Path,
        *,
        variables: Mapping[str, str] | None = None,
        sharing: int = 1,
        grace_s: float = GRACE_S,
    ) -> None:
        self.submission = logs.name
        self._folder = folder
        self._logs = logs
        self._grace_s = grace_s
        self._shown = dict.fromkeys(list_log_files(logs, 0), 0)  # number of bytes by file
        self._is_stopping = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self.exit_error = ""
        self._failed_at: float | None = None
        command = [
            sys.executable,
            "-u",
            "-m",
            "pretrain.common.ranks.rank",
            entry,
            str(folder),
            self.submission,
            *words,
        ]
        environment = {**_build_environment(count * sharing), **(variables or {})}
        make_folder(logs)
        # Ranks never see the terminal's Ctrl-C, and see SIGTERM only once they can obey it.
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for rank in range(count):
                out, err = list_log_files(logs, rank)
                with open(out, "wb") as stdout, open(err, "wb") as stderr:
                    place = build_rank_environment(rank, count, rank, count)
                    process = subprocess.Popen(command, env={**environment, **place}, stdout=stdout, stderr=stderr)
                self._processes.append(process)
        except OSError as error:
            self.stop(now=True)
            raise UserError(f"cannot start the processes of {folder}: {error}; free memory or processes") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        self.start_times = {str(process.pid): read_start_time(process.pid) for process in self._processes}

    def poll(self) -> bool:
        """Return whether every rank has ended; kill ranks that have waited for some seconds for one that failed."""
        codes = [process.poll() for process in self._processes]
        if self._failed_at is None:
            self._note_failure(codes)
        elif None in codes and time.monotonic() > self._failed_at + self._grace_s:
            self.stop(now=True)
        return None not in codes

    def _note_failure(self, codes: Sequence[int | None]) -> None:
        """Note when a rank has failed, and record how it ended if it has not recorded an error itself.

        Args:
            codes: each rank's exit status, or None while it runs; one that has recorded an error may hang at its exit.
        """
        for rank, code in enumerate(codes):
            has_recorded = has_recorded_failure(self._folder, rank, self.submission)
            if code in (0, STOPPED) or (code is None and not has_recorded):
                continue
            self._failed_at = time.monotonic()
            if code is not None and not has_recorded and not (code < 0 and self._is_stopping):
                self.exit_error = f"rank {rank}: {_describe_exit(code, list_log_files(self._logs, rank)[1])}"
                record_failure(self._folder, rank, self.exit_error, self.submission)
            return

    def show_output(self, prefix: str = "") -> None:
        """Print the complete lines that rank 0 has written since the last call, each after ``prefix``."""
        for path, offset in self._shown.items():
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(offset)
                data = file.read()
                lines = data[: data.rfind(b"\n") + 1]
                self._shown[path] = offset + len(lines)
                stream = sys.stderr if path.suffix == ".err" else sys.stdout
                for line in lines.decode(errors="replace").splitlines():
                    print(f"{prefix}{shorten_paths(strip_control(line))}", file=stream, flush=True)

    def stop(self, now: bool = False) -> None:
        """Ask every rank to stop after the current step and its checkpoint; with ``now``, kill every rank."""
        self._is_stopping = True
        for process in self._processes:
            process.send_signal(signal.SIGKILL if now else signal.SIGTERM)


def run_ranks(
    entry: str,
    words: Sequence[str],
    count: int,
    folder: str | Path,
    logs: Path,
    stop: StopRequest,
    *,
    grace_s: float = GRACE_S,
) -> None:
    """Run ``count`` ranks (see `Ranks`) to their end, with the output of rank 0 on the terminal.

    Args:
        stop: the request to stop this process, which is passed on to every rank.

    Raises:
        UserError: a rank raised it.
        RuntimeError: a rank failed, or was killed.
        Stopped: the ranks have stopped; its remedy is theirs.
    """
    ranks = Ranks(entry, words, count, folder, logs, grace_s=grace_s)
    is_stopping = False
    try:
        with survive_lost_output():
            while not ranks.poll():
                ranks.show_output()
                if stop.reason and not is_stopping:
                    is_stopping = True
                    ranks.stop()
                time.sleep(POLL_S)
            ranks.show_output()
    except BaseException:  # a second Ctrl-C
        ranks.stop(now=True)
        raise
    outcome = read_outcome(folder, ranks.submission)
    failure = outcome["failure"]
    if failure.get("user_error"):
        raise UserError(failure["error"])
    if failure:
        trace = failure["traceback"] if failure["rank"] else ""  # rank 0 prints its own
        raise RuntimeError(f"rank {failure['rank']} on {failure['host']} failed: {failure['error']}\n{trace}".rstrip())
    if outcome["state"] != "complete" and ranks.exit_error:  # which could not be recorded
        raise RuntimeError(ranks.exit_error)
    if outcome["state"] != "complete":
        reason = outcome["reason"].replace(STOP_REASON, stop.reason) or stop.reason
        raise Stopped(reason or "a signal", **({"remedy": outcome["remedy"]} if outcome.get("remedy") else {}))


def name_log_folder(folder: str | Path) -> Path:
    """Return a new log folder, whose name is unique: job ids repeat after a reset of SLURM."""
    return Path(folder) / file_names.LAUNCH_FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


def list_log_files(logs: Path, rank: int) -> list[Path]:
    """Return the files of a rank's standard output and standard error."""
    return [logs / f"{rank}.{kind}" for kind in ("out", "err")]


def _build_environment(processes: int) -> dict[str, str]:
    """Return the environment of the ranks, which import this code whatever their working directory is.

    Args:
        processes: the number of processes that share this machine's cores.
    """
    values = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER_JOB)}
    earlier = values.get("PYTHONPATH")
    if str(_ROOT) != sysconfig.get_path("purelib"):  # not installed as a wheel
        values |= {"PYTHONPATH": f"{_ROOT}:{earlier}" if earlier else str(_ROOT)}
    values["PYTHONSAFEPATH"] = "1"
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    if processes > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cores() // processes)))
    return values


def _describe_exit(code: int, stderr: Path) -> str:
    """Describe the exit of a rank that left no record."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"it was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = stderr.read_text(errors="replace").splitlines()
    return f"it ended with status {code}: {''.join(lines[-1:])}"
