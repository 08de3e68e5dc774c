"""Runs the stages of a graph on this machine, with their output on the terminal.

Each stage starts after the ones that it builds on, several at the same time if asked to, each with its own GPUs. A
failure ends its own branch only. The first Ctrl-C stops the running stages after a checkpoint, the second immediately.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import UserError

from .job import LOCAL_STOP, hang_up
from .jobs import silent_end
from .local import LocalJob, Tail, ended_by, log_paths, note_end
from .options import Options, visible_gpus
from .records import attempts, progress

if TYPE_CHECKING:
    from .graph import Graph, Node

# What a stage is usually followed by.
_NEXT = {
    "pretrain": "next: python tools/convert_to_d2.py {folder} weights/{name}.pth",
    "transfer": "next: python tools/launch.py report {folder}",
}


class Interrupted(Exception):
    """The user ended the stages that ran; the text says how each ended."""


@dataclass
class _Running:
    """A stage that was started, its output that has not been shown yet, and the GPUs it has."""

    node: Node
    job: LocalJob
    output: Tail
    started: float
    gpus: list[str]


class LocalRun:
    """Runs the stages ``missing`` of a graph, at most `Options.parallel` at once."""

    def __init__(self, graph: Graph, options: Options, missing: dict[str, Node]) -> None:
        self._graph, self._options, self._missing = graph, options, missing
        self._is_alone = graph.report is None
        self._waiting = {node.key: node for node in graph.nodes}
        self._running: dict[str, _Running] = {}
        self._failed: dict[str, str] = {}  # the failed stage, by the stages that it ends
        self._free_gpus = visible_gpus()
        self._signals: list[str] = []  # that this process got; the first asks the jobs to stop, the second kills them
        self._interruptions: list[str] = []
        self._line = _StatusLine()
        self._status = 0

    def run(self) -> int:
        """Returns the exit status.

        Raises:
            Interrupted: by a signal or `cancel`; every running stage has ended, and no other one was started.
        """
        with self._handling_signals():
            while True:
                while not (self._signals or self._interruptions) and (node := self._next()):
                    self._start(node)
                if not self._running:
                    break
                self._finish(self._wait())
        if self._signals and self._waiting and not self._interruptions:
            self._interruptions.append(f"{self._head(next(iter(self._waiting)))} was not started: {self._signals[0]}")
        if self._interruptions:
            raise Interrupted("\n".join(self._interruptions))
        return self._status

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, *hang_up())
        earlier = {number: signal.signal(number, self._forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: Any) -> None:
        self._signals.append("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if len(self._signals) == 1:
            text = "Stopping after the current step and its checkpoint; press Ctrl-C again to stop immediately."
            print(f"\n{text}", file=sys.stderr, flush=True)
        for running in self._running.values():
            running.job.ask_to_stop() if len(self._signals) == 1 else running.job.kill()

    def _next(self) -> Node | None:
        """A stage that can start now; removes complete stages, and those that a failed one ends, from the list."""
        free = len(self._free_gpus)
        for node in list(self._waiting.values()):
            if len(self._running) == (self._options.parallel or 1):
                break
            if cause := next((self._failed[parent] for parent in node.parents if parent in self._failed), ""):
                print(f"{self._head(node.key)}: skipped, because {cause} failed", file=sys.stderr, flush=True)
                self._failed[node.key] = cause
                self._waiting.pop(node.key)
            elif node.key not in self._missing:
                print(f"{self._head(node.key)}: already complete", flush=True)
                self._waiting.pop(node.key)
            elif not any(parent in self._waiting or parent in self._running for parent in node.parents):
                if self._gpus(node) <= free or not self._running:
                    return node
                free = 0  # it is next in line for the GPUs that others have; a stage that needs none may start
        return None

    def _start(self, node: Node) -> None:
        self._waiting.pop(node.key)
        if not self._is_alone:
            print(f"{self._head(node.key)} -> {short(node.spec.folder)}", flush=True)
        count = self._gpus(node)
        gpus, self._free_gpus = self._free_gpus[:count], self._free_gpus[count:]
        is_shared = self._options.gpus is not None or (self._options.parallel or 1) > 1
        started = time.monotonic()
        try:
            job = LocalJob(node.spec, self._options.fitting(node.spec), gpus if is_shared else None)
        except UserError as error:
            if self._is_alone:
                raise
            self._free_gpus = gpus + self._free_gpus
            self._fail(node, f"error: {error}", 2)
            return
        prefix = f"{node.key}: " if (self._options.parallel or 1) > 1 else ""
        self._running[node.key] = _Running(node, job, Tail(log_paths(job.logs, 0), prefix), started, gpus)
        if self._signals:  # while it was being started
            job.ask_to_stop() if len(self._signals) == 1 else job.kill()

    def _wait(self) -> _Running:
        """Waits until one of the jobs has ended, and shows the output of all."""
        while True:
            ended = next((key for key, running in self._running.items() if running.job.has_ended()), None)
            self._line.clear()
            for running in self._running.values():
                running.output.copy()
            if ended is not None:
                return self._running.pop(ended)
            self._line.show([progress(running.job.folder) for running in self._running.values()])
            time.sleep(0.2)

    def _finish(self, running: _Running) -> None:
        self._free_gpus = running.gpus + self._free_gpus
        node, job, folder = running.node, running.job, running.node.spec.folder
        last: dict[str, Any] = next(iter(attempts(folder, {"logs": job.logs})[-1:]), {"state": "running"})
        by = ended_by(job.folder, job.logs)
        if self._signals and not by:
            by = f"a second {self._signals[1]}" if len(self._signals) > 1 else self._signals[0]
            note_end(job.folder, job.logs, by)
        if by:
            self._interruptions.append(_interruption(folder, last, by))
        elif last["state"] == "done":
            self._end_well(node, running.started)
        elif failure := last.get("failure"):
            if failure["user_error"]:
                self._fail(node, f"error: {failure['error']}", 2)
            else:
                text = (failure["traceback"] or failure["error"]).rstrip()
                place = f"{node.spec.stage} in {folder} failed on rank {failure['rank']} ({failure['host']})"
                self._fail(node, f"{text}\n{place}", 1)
        else:
            state, reason = last["state"].replace("running", "failed"), last.get("reason") or silent_end(Path(folder))
            self._fail(
                node, f"{node.spec.stage} in {folder} {state}: {reason}; run the same command again to resume", 1
            )

    def _end_well(self, node: Node, started: float) -> None:
        if not self._is_alone:
            print(f"{self._head(node.key)}: {time.monotonic() - started:.0f} s", flush=True)
        elif text := _NEXT.get(node.spec.stage):
            folder = os.path.relpath(node.spec.folder)
            print(text.format(folder=shlex.quote(folder), name=shlex.quote(Path(folder).name)))

    def _fail(self, node: Node, text: str, status: int) -> None:
        self._failed[node.key] = node.key
        self._status = self._status or status
        after = "" if self._is_alone else f"\n{self._head(node.key)}: failed; the other branches continue"
        print(f"{text}{after}", file=sys.stderr, flush=True)

    def _head(self, key: str) -> str:
        place = next(i for i, node in enumerate(self._graph.nodes, 1) if node.key == key)
        return f"[{place}/{len(self._graph.nodes)}] {key}"

    def _gpus(self, node: Node) -> int:
        return self._options.fitting(node.spec).gpus_per_node


def _interruption(folder: str, last: dict[str, Any], by: str) -> str:
    if last["state"] == "done":  # no step was left to stop after
        return f"the stage in {folder} completed before it could be stopped"
    if last["state"] == "running":
        return f"the stage in {folder} was stopped immediately by {by}, without a checkpoint"
    failure = last.get("failure", {}).get("error", "")
    return last.get("reason", "").replace(LOCAL_STOP, by) or f"{by}: the stage in {folder} has ended; {failure}"


class _StatusLine:
    """The newest metrics on the last line of the terminal; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._shown, self._is_terminal = "", sys.stderr.isatty()

    def show(self, parts: list[str]) -> None:
        if self._is_terminal:
            self._shown = " | ".join(filter(None, parts))[: shutil.get_terminal_size().columns - 1]
            print(f"\r{self._shown}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=sys.stderr, flush=True)
            self._shown = ""


def short(path: str) -> str:
    """A path relative to the working folder, where that is above it."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
