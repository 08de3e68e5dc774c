"""The run of a graph's stages on this machine, with their output on the terminal; `submission` is that on SLURM.

Each stage starts after the ones that it builds on, several at the same time if asked to, each with its own GPUs. A
failure ends its own branch only. The first Ctrl-C stops the running stages after a checkpoint, the second immediately.
"""

import contextlib
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.gpus import list_visible_gpus
from pretrain.common.interrupt import Stopped, handle_stop_signals
from pretrain.common.output import warn
from pretrain.common.ranks.parent import POLL_S, Ranks
from pretrain.common.ranks.rank import STOP_REASON
from pretrain.common.run.state import is_end_recorded, read_outcome, update_state
from pretrain.common.shell import shorten_path
from tools.stages.base import Stage

from ..execution.job import CANCEL, CANCEL_NOW, describe_unrecorded_exit
from ..execution.local_job import start_ranks
from ..resources import Resources
from .graph import Graph, Node

_SENDERS: dict[int, str] = {signal.SIGINT: "Ctrl-C", CANCEL: "launch.py cancel", CANCEL_NOW: "launch.py cancel --now"}


@dataclass
class RunningStage:
    """A stage whose ranks are running; ``gpus`` are the names of its GPUs, ``prefix`` is shown before its output."""

    stage: Stage
    ranks: Ranks
    gpus: list[str]
    prefix: str
    started: float = field(default_factory=time.monotonic)


class LocalRun:
    """A run of a graph's ``missing`` stages with the ``resources`` of each, at most ``parallel`` of them at once."""

    def __init__(self, graph: Graph, missing: dict[str, Node], resources: dict[str, Resources], parallel: int) -> None:
        self._graph, self._missing, self._resources = graph, missing, resources
        self._parallel = parallel
        self._waiting = {node.key: node for node in graph.nodes}
        self._width = max(map(len, self._waiting), default=0)  # of the column with the names of stages
        self._running: dict[str, RunningStage] = {}
        self._failed: dict[str, str] = {}  # the failed stage, by the stages that it ends
        self._num_done = 0
        needs_gpus = any(resources[key].gpus for key in missing)
        self._free_gpus = list_visible_gpus() if needs_gpus else []
        self._stopped_by = ""  # what asked the jobs to stop
        self._killed_by = ""  # what killed them
        self._interruptions: list[str] = []
        self._status = 0

    def run(self) -> int:
        """Run the stages; return the exit status.

        Raises:
            Stopped: a signal or `cancel` stopped the run; its text says how each running stage ended.
        """
        with handle_stop_signals(self._forward, CANCEL, CANCEL_NOW):
            self._start_ready()
            while self._running:
                self._finish(*self._wait())
                self._start_ready()
        if self._stopped_by and self._waiting and not self._interruptions:
            first = next(iter(self._waiting))
            self._interruptions.append(f"{first} was not started: {self._stopped_by}")
        if self._interruptions:
            raise Stopped("\n".join(self._interruptions))
        return self._status

    def _forward(self, number: int, _frame: Any) -> None:
        sender = _SENDERS.get(number, signal.Signals(number).name)
        is_first = not self._stopped_by
        self._stopped_by = self._stopped_by or sender  # before the print, during which a second signal may come
        if number == CANCEL_NOW:
            self._killed_by = sender
        elif number == signal.SIGINT and not is_first:  # the end of a session sends several other signals at once
            self._killed_by = f"a second {sender}"
        elif is_first:
            text = "Stopping after the current step and its checkpoint; press Ctrl-C again to stop immediately."
            print(f"\n{text}", file=sys.stderr, flush=True)
        for running in self._running.values():
            running.ranks.stop(now=bool(self._killed_by))

    def _start_ready(self) -> None:
        """Start what can start now; skip complete stages, and those that depend on a failed one."""
        is_gpu_awaited = False  # by a stage; then only stages that need none may start before it
        for node in list(self._waiting.values()):
            if self._stopped_by or self._interruptions or len(self._running) == self._parallel:
                return
            cause = next((self._failed[parent] for parent in node.parents if parent in self._failed), "")
            if cause:
                warn(f"skipped {node.key}, because {cause} failed")
                self._failed[node.key] = cause
                self._waiting.pop(node.key)
            elif node.key not in self._missing:
                self._report_done(node.key, "already complete")
                self._waiting.pop(node.key)
            elif not any(parent in self._waiting or parent in self._running for parent in node.parents):
                gpus = self._resources[node.key].gpus
                if gpus <= (0 if is_gpu_awaited else len(self._free_gpus)) or not self._running:
                    self._start(node)
                else:
                    is_gpu_awaited = True

    def _start(self, node: Node) -> None:
        self._waiting.pop(node.key)
        if not self._graph.is_single:
            print(f"started {node.key} -> {shorten_path(node.stage.folder)}", flush=True)
        resources = self._resources[node.key]
        gpus = self._free_gpus[: resources.gpus]
        prefix = f"{node.key:{self._width}} | " if self._parallel > 1 else ""
        try:
            ranks = start_ranks(node.stage, resources, gpus)
        except UserError as error:
            self._fail(node.key, f"error: {error}", 2)
            return
        self._running[node.key] = RunningStage(node.stage, ranks, gpus, prefix)
        self._free_gpus = self._free_gpus[len(gpus) :]
        if self._stopped_by:  # while it was being started
            ranks.stop(now=bool(self._killed_by))

    def _wait(self) -> tuple[str, RunningStage]:
        """Wait until one of the stages has ended, showing the output of all; return its key and the stage."""
        while True:
            ended = next((key for key, running in self._running.items() if running.ranks.poll()), None)
            for running in self._running.values():
                running.ranks.show_output(running.prefix)
            if ended is not None:
                return ended, self._running.pop(ended)
            time.sleep(POLL_S)

    def _finish(self, key: str, running: RunningStage) -> None:
        self._free_gpus = running.gpus + self._free_gpus
        folder = running.stage.folder
        submission = running.ranks.submission
        outcome = read_outcome(folder, submission)
        failure = outcome["failure"]
        if self._stopped_by:
            sender = self._killed_by or self._stopped_by
            if not is_end_recorded(outcome):  # the ranks were killed
                with contextlib.suppress(UserError):  # on a full disk the run must still end
                    update_state(folder, job=submission, state="stopped", reason=f"it was stopped by {sender}")
            self._interruptions.append(_describe_interruption(shorten_path(folder), outcome, sender))
        elif outcome["state"] == "complete":
            if not self._graph.is_single:
                self._report_done(key, f"{time.monotonic() - running.started:.0f} s")
            elif command := running.stage.name_next_command(shorten_path(folder)):
                print(f"next: {command}")
        elif not failure:
            end = f"{outcome['state']}: {outcome['reason']}"
            if not is_end_recorded(outcome):
                end = f"failed: {describe_unrecorded_exit(Path(folder))}"
            self._fail(key, f"{running.stage.name} in {folder} {end}; run the same command again to resume", 1)
        elif failure["user_error"]:
            self._fail(key, f"error: {failure['error']}", 2)
        else:
            summary = f"{running.stage.name} in {folder} failed on rank {failure['rank']} ({failure['host']})"
            trace = failure["traceback"] if failure["rank"] else ""  # rank 0 prints its own
            self._fail(key, f"{trace}{summary}: {failure['error']}", 1)

    def _report_done(self, key: str, how: str) -> None:
        """Count a complete stage; stages that run side by side are counted in the order in which they end."""
        self._num_done += 1
        print(f"[{self._num_done}/{len(self._graph.nodes)}] done: {key}, {how}", flush=True)

    def _fail(self, key: str, text: str, status: int) -> None:
        self._failed[key] = key
        self._status = self._status or status
        note = "" if self._graph.is_single else f"\nfailed: {key}; the other branches continue"
        warn(f"{text}{note}")


def _describe_interruption(folder: str, outcome: dict[str, Any], sender: str) -> str:
    if outcome["state"] == "complete":  # no step was left to stop after
        return f"the stage in {folder} finished before the stop request"
    if not is_end_recorded(outcome):
        return f"the stage in {folder} was stopped immediately by {sender}, without a checkpoint"
    if outcome["failure"]:
        return f"{sender}: the stage in {folder} has failed: {outcome['failure']['error']}"
    return f"the stage in {folder} was stopped by {outcome['reason'].replace(STOP_REASON, sender)}"
