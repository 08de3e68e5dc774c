"""Helpers of the launcher's tests: fake stages, launchers in processes, and the files that jobs leave in a folder."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common.run.state import update_state
from tests.tools.launcher.fake_stages import Fake
from tools.launcher.execution.job import Job, read_jobs
from tools.launcher.execution.status import collect
from tools.launcher.execution.submit import copy_code, submit_job
from tools.launcher.graphs.graph import Graph, Node, build_graph, build_single
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions, resolve_options
from tools.stages.base import Stage
from tools.stages.convert import Convert
from tools.stages.pretrain import Pretrain
from tools.stages.registry import find_kind
from tools.stages.transfer import Transfer

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
TINY = ["MODEL.ARCH", "resnet18", "SOLVER.EPOCHS", "2"]
HERE = JobOptions(cluster="local", gpus=0)
# Jobs as launch.json lists them.
LOCAL = {
    "id": "99999999",
    "cluster": "local",
    "name": "n",
    "logs": "/l/s",
    "host": socket.gethostname(),
    "submitted": 0,
}
ELSEWHERE = {**LOCAL, "host": "another-machine"}
SLURM = {**LOCAL, "id": "77", "cluster": "slurm"}


def fake(folder: Path | str, function: str = "count", *args: object) -> Stage:
    """Build a stage of `fake_stages`; one that counts counts to 1 unless ``args`` say otherwise."""
    args = args or ((1,) if function == "count" else ())
    return Fake(str(folder), Fake.Options(function, args))


def build_pretrain(recipe: Path | str, overrides: Sequence[str] = ()) -> Stage:
    return Pretrain.load(Pretrain.Options(config_file=str(recipe)), overrides)


def build_probe(name: str, weights: str, config_file: str = "", overrides: Sequence[str] = (), base: str = "") -> Stage:
    probe: Any = find_kind(name)
    return probe.load(probe.Options(weights, config_file), overrides, base)


def build_convert(source: str, output: str, folder: str = "") -> Stage:
    return Convert.load(Convert.Options(source, output), folder=folder)


def build_transfer(config_file: str, overrides: Sequence[str] = (), **options: Any) -> Stage:
    return Transfer.load_command(Transfer.Options(config_file, **options), overrides)


def graph_of(folder: Path, *nodes: Node) -> Graph:
    return build_graph(str(folder), nodes, fake(folder / "report"))


def chain(folder: Path) -> Graph:
    """Build a graph of stage a, and of stage b that builds on it."""
    return graph_of(folder, Node("a", fake(folder / "a")), Node("b", fake(folder / "b"), ("a",)))


def started(folder: Path, *job_records: dict[str, Any], spec: dict[str, Any] | None = None) -> Path:
    """Write what the launcher leaves in the folder of a stage for which it has started these jobs."""
    (folder / "launch").mkdir(parents=True)
    spec = spec or {"stage": "knn"}
    record = {"spec": spec, "options": asdict(HERE), "jobs": job_records}
    (folder / "launch" / "launch.json").write_text(json.dumps(record))
    return folder


def job_of(folder: Path | str) -> Job:
    return read_jobs(Path(folder))[-1]


def run_alone(stage: Stage, options: JobOptions = HERE) -> int:
    return start_graph(build_single(stage), options)


def submit_jobs(stages: Sequence[Stage], options: JobOptions) -> list[str]:
    """Submit stages without what `start_graph` checks; return the jobs' ids."""
    code = copy_code(os.path.commonpath([stage.folder for stage in stages]))
    return submit_job(stages, options.for_stage(stages[0]), code)


def outcome(folder: Path) -> dict[str, Any]:
    """Return what the folder's last job has recorded."""
    return job_of(folder).read_outcome()


def end(folder: Path, state: str, **values: Any) -> None:
    """Record what a job whose submission is called s records when it ends; other ``values`` replace its own."""
    times = {"started": time.time(), "ended": time.time()}
    update_state(folder, **{"stage": "knn", "state": state, "job": "s", "attempt": 0, "host": "h", **times, **values})


def complete(stage: Stage) -> Stage:
    """Write what a complete job leaves."""
    end(Path(stage.folder), "complete", stage=stage.name, fingerprint=stage.fingerprint(), work=stage.identity)
    Path(stage.folder, stage.product).write_text("{}")
    return stage


def shown(folder: Path) -> dict[str, Any]:
    """Return the status of the stage in a folder."""
    (stage,) = collect(folder)
    return stage


def steps(folder: Path, rank: int = 0) -> list[int]:
    return [int(line) for line in (folder / f"steps.{rank}").read_text().split()]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


@contextlib.contextmanager
def nobody_reads() -> Iterator[None]:
    """Print to a pipe whose reader has exited, such as `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream, contextlib.redirect_stdout(stream):
        yield


class Attached:
    """A launcher in its own session: signals go to the whole foreground group, as a terminal sends them.

    It runs ``code``, an expression that starts stages and returns the exit status.
    """

    def __init__(self, code: str, by: Sequence[str] = (), stdout: int | None = None) -> None:
        imports = "import sys; from pathlib import Path; from tests.tools.launcher.helpers import *\n"
        imports += "from pretrain.common.command_line import run_command_line\n"
        self._process = subprocess.Popen(
            [*by, sys.executable, "-c", f"{imports}run_command_line(lambda _: {code})"],
            cwd=ROOT,
            start_new_session=True,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup themselves
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def signal_twice(self, first: int, second: int) -> None:
        assert self._process.stderr is not None
        self.signal(first)
        while "press Ctrl-C again" not in self._process.stderr.readline():
            assert self._process.poll() is None
        self.signal(second)

    def end(self, status: int = 130) -> str:
        """Wait for it; return its standard error. Exit status 130 means a signal or `cancel`."""
        _, printed = self._process.communicate(timeout=60)
        assert self._process.returncode == status, printed
        return printed


def from_site(text: str, **options: object) -> JobOptions:
    """Return the options of SLURM jobs that a site file with this text and the command line set."""
    Path("cluster.yaml").write_text(text)
    return resolve_options({"cluster": "slurm", **options}, "cluster.yaml")
