"""Command lines in separate processes, with a fault at a chosen file system call."""

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import tiny
from tests.faults.injection import Fault, Injector, Report
from tests.pretrain.ranks import START_METHOD

_COUNT = Fault()


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit status (negative for a signal, None if it hung), its output and its report."""

    status: int | None
    text: str
    report: Report = field(default_factory=Report)


class Commands:
    """The `main` of modules, each run in a fork of a process that has imported the slow libraries.

    ResNet-18 is a tiny one, because what a stage writes takes most of its time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context(START_METHOD)

    def run(self, module: str, *argv: str | Path, under: Path, fault: Fault = _COUNT, timeout: float = 120.0) -> Ended:
        """Run ``python MODULE ARGV`` in the folder ``under``; only calls on paths in it count."""
        output = self._folder / "output.txt"
        report_file = self._folder / "report.pkl"
        report_file.unlink(missing_ok=True)
        words = [module.replace(".", "/") + ".py", *map(str, argv)]
        process = self._context.Process(
            target=_run_main, args=(module, words, under, output, Injector(str(under), fault, str(report_file)))
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return Ended(None, output.read_text(errors="replace"))
        report = pickle.loads(report_file.read_bytes()) if report_file.exists() else Report()
        return Ended(process.exitcode, output.read_text(errors="replace"), report)


def _run_main(module: str, words: list[str], folder: Path, output: Path, injector: Injector) -> None:
    os.setsid()
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.argv = words
    os.chdir(folder)
    tiny.use(pytest.MonkeyPatch())
    injector.install()
    from pretrain.common.command_line import run_command_line

    status: object = 1
    try:
        run_command_line(importlib.import_module(module).main)
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    injector.write_report()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status or 0))
