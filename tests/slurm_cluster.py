"""A real SLURM cluster of two nodes on this machine: the `slurm_cluster` fixture.

munged, slurmctld and two slurmd run as this user from one private folder; nothing of the system's SLURM is touched.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NODES = ("127.0.1.1", "127.0.1.2")  # addresses as names: the first host's name is MASTER_ADDR, and must resolve
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")

_CONF = Path(__file__).with_name("slurm.conf")


def _wait(condition: Callable[[], object], what: str, logs: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            tail = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in sorted(logs.glob("*.log")))
            raise RuntimeError(f"{what} took more than {seconds:.0f} s\n{tail}")
        time.sleep(0.05)


def _free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    for first in range(21000 + os.getpid() % 20000, 64000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, socket_ in enumerate(sockets):
                socket_.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for socket_ in sockets:
                socket_.close()
    raise RuntimeError("no free ports")


class SlurmCluster:
    """The running cluster: its environment is in ``os.environ`` until `stop`."""

    def __init__(self) -> None:
        # Short and readable by all: a Unix socket's path holds at most 107 characters.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        self._daemons: dict[str, subprocess.Popen] = {}
        self._saved = dict(os.environ)

    def start(self) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")):
                del os.environ[name]
        for folder in ("state", *(f"spool.{node}" for node in NODES)):
            (self.root / folder).mkdir()
        port = _free_ports(3)
        host = socket.gethostname().split(".")[0]
        # Job ids differ between clusters: a used log folder would give back an old job's result.
        values = {"root": self.root, "host": host, "user": getpass.getuser(), "port": port}
        values |= {"ports": f"{port + 1}-{port + 2}", "first_job": secrets.randbelow(10**6) + 1000}
        (self.root / "slurm.conf").write_text(_CONF.read_text().format(**values))
        os.environ["PATH"] += ":/usr/sbin"  # where Debian installs the daemons, which is not on a user's path
        os.environ["SLURM_CONF"] = str(self.root / "slurm.conf")
        self._start_munge()
        self._start("slurmctld", "-D", "-f", str(self.root / "slurm.conf"))
        for node in NODES:
            self.start_node(node)
        _wait(lambda: "UP" in _output("scontrol", "ping"), "slurmctld", self.root)
        self.wait_idle()

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-f", str(self.root / "slurm.conf"), "-N", node, key=node)

    def kill_node(self, node: str) -> None:
        """Kill the daemon and all processes of its jobs at once, as a power failure would."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        tasks = _of_node(node, str(self.root))
        parents = {pid for pid, _ in tasks if "slurmstepd" in Path(f"/proc/{pid}/cmdline").read_text()}
        for pid in [*parents, *(pid for _, pid in tasks)]:  # the step daemons first: they must not report the deaths
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def preempt(self) -> None:
        """Run a job of the partition with higher priority on both nodes for a second."""
        _output("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    def node_of(self, job_id: str | int) -> str:
        return _output("squeue", "-h", "-j", str(job_id), "-o", "%N").strip()

    def state(self, job_id: str | int) -> str:
        """Return SLURM's state of a job, such as PENDING, RUNNING or COMPLETED."""
        return (_output("squeue", "-h", "--states=all", "-j", str(job_id), "-o", "%T").split() or ["UNKNOWN"])[0]

    def wait_state(self, job_id: str | int, *states: str, seconds: float = 60) -> None:
        _wait(lambda: self.state(job_id) in states, f"job {job_id} to become {states}", self.root, seconds)

    def wait_idle(self) -> None:
        listed = ("sinfo", "-h", "-N", "-p", "debug", "-o", "%t")
        _wait(lambda: _output(*listed).split() == ["idle"] * len(NODES), "idle nodes", self.root)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):  # the daemons end whatever the jobs do
            _output("scancel", "--user", getpass.getuser())
            active = "pending,running,completing"
            _wait(lambda: not _output("squeue", "-h", f"--states={active}"), "scancel", self.root)
        for name in (*NODES, "slurmctld", "munged"):
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                daemon.terminate()
                try:
                    daemon.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        os.environ.clear()
        os.environ.update(self._saved)
        shutil.rmtree(self.root, ignore_errors=True)

    def _start_munge(self) -> None:
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={self.root}/munge.{name}" for name in ("pid", "seed", "log")]
        self._start("munged", "-F", f"--key-file={key}", f"--socket={self.root}/munge.sock", *files)
        _wait(lambda: (self.root / "munge.sock").exists(), "munged", self.root)

    def _start(self, program: str, *words: str, key: str = "") -> None:
        with open(self.root / f"{key or program}.out.log", "ab") as log:
            self._daemons[key or program] = subprocess.Popen([program, *words], stdout=log, stderr=log)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def _of_node(node: str, root: str) -> list[tuple[int, int]]:
    """Return (parent id, process id) of all processes on a node of the cluster in ``root``."""
    processes = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            text = environment.read_text(errors="replace")
            if f"SLURMD_NODENAME={node}\0" in text and root in text:
                fields = (environment.parent / "stat").read_text().rsplit(")", 1)[1].split()
                processes.append((int(fields[1]), int(environment.parent.name)))
    return processes


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Start the cluster once per session; without SLURM, skip the tests that use it."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} missing; as root on Debian: apt-get install slurmctld slurmd slurm-client munge"
        )
    cluster = SlurmCluster()
    os.environ["PATH"] = path
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
