"""Command lines in separate processes, with a fault at a chosen file system call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ACTIONS = {"fail from": 1, "signal": 2, "count": 3}
PRELOADED = (
    "torch", "torchvision", "cv2", "torch.utils.tensorboard.writer", "torch._dynamo", "pretrain.train",
    "tests.in_process", "transfer.train_net", "matplotlib.figure", "sklearn.datasets", "scipy.stats",
    "pycocotools.cocoeval",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens at the ``nth`` call (from 1) of ``call`` on a path that holds ``part``.

    Attributes:
        action: count | fail from (that call on) | signal.
        call: open | read | write | fsync | rename | link | unlink | mkdir; empty: any but read.
        value: the error or the signal.
    """

    action: str
    nth: int = 1
    call: str = ""
    part: str = ""
    value: int = 0


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status (negative: a signal; None: it hung), counted calls, and what it printed.

    Attributes:
        children: of a command that a fault has stopped (SIGSTOP), after which it was killed: its processes.
    """

    status: int | None
    calls: int
    text: str
    children: tuple[int, ...] = ()


class Commands:
    """Runs the `main` of modules, each in a fork of one process that has imported what is slow to import."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.library = library = folder / "syscalls.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, _HERE / "syscalls.c", "-ldl", "-lpthread"], check=True
        )
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server", *PRELOADED],
            cwd=_HERE.parents[1], env={**os.environ, "LD_PRELOAD": str(library)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, module: str, *argv: str | Path, under: Path, fault: Fault = Fault("count", 0), log: Path | None = None,
        timeout: float = 120.0,
    ) -> Ended:  # fmt: skip
        """Runs ``python MODULE ARGV`` in the folder ``under``; only calls on paths in it count.

        Args:
            log: where to record the calls that changed something (see `replay`).
        """
        output = self._folder / "output.txt"
        rule = [str(under), fault.call, fault.part, fault.nth, _ACTIONS[fault.action], fault.value, str(log or "")]
        job = {"module": module, "argv": [str(word) for word in argv], "folder": str(under), "rule": rule,
               "output": str(output), "timeout": timeout}  # fmt: skip
        assert self._server.stdin and self._server.stdout
        print(json.dumps(job), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        return Ended(answer["status"], answer["calls"], output.read_text(errors="replace"), tuple(answer["children"]))

    def as_job(
        self, *argv: str | Path, under: Path, fault: Fault | None = None, rank: int = 0, timeout: float = 240.0
    ) -> Ended:
        """Runs ``python tools/launch.py ARGV``; one ``rank`` of the local job that it starts meets the ``fault``, once.

        A fault of reading is met anywhere, one of writing ``under`` the folder.
        """
        env = {**os.environ, "LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1"}
        if fault:
            where = [rank, "/" if fault.call == "read" else under]
            rule = [*where, fault.call, fault.part, fault.nth, _ACTIONS[fault.action], fault.value]
            (self._folder / "rule.txt").write_text("".join(f"{word}\n" for word in rule))
            env["FAULTS"] = str(self._folder / "rule.txt")
        words = [sys.executable, str(_HERE.parents[1] / "tools/launch.py"), *map(str, argv)]
        done = subprocess.run(
            words, cwd=under, env=env, text=True, errors="replace", timeout=timeout, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not fault or not (self._folder / "rule.txt").exists(), f"no rank read the rule: {done.stdout}"
        return Ended(done.returncode, 0, done.stdout)

    def close(self) -> None:
        if self._server.stdin:
            self._server.stdin.close()
        self._server.wait(60)
