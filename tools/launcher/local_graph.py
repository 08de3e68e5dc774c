"""Runs the stages of a graph on this machine: several at the same time if asked to, each with its own GPUs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common import interrupt
from pretrain.common.errors import UserError

from .attach import Interrupted, Terminal
from .options import Options, visible_gpus
from .run import StageFailed, execute, raise_if_not_done
from .submit import submit

if TYPE_CHECKING:
    from .graph import Graph, Node


@dataclass(frozen=True)
class _Running:
    """A stage that was started: how its lines begin, when, and the GPUs it has."""

    node: Node
    head: str
    started: float
    gpus: list[str]


class LocalGraph:
    """Runs what is missing of ``graph``, each stage after the ones it builds on, at most `Options.parallel` at once.

    A stage that fails ends its own branch; the others continue.
    """

    def __init__(self, graph: Graph, options: Options, missing: dict[str, Node]) -> None:
        self._graph, self._options, self._missing = graph, options, missing
        self._waiting = {node.key: node for node in graph.nodes}
        self._running: dict[str, _Running] = {}
        self._failed: dict[str, str] = {}  # the failed stage, by the stages that it ends
        self._free_gpus = visible_gpus()
        self._interruptions: list[str] = []
        self._status = 0

    def run(self) -> int:
        """Returns the exit status.

        Raises:
            Interrupted: by a signal or `cancel`; every running stage has ended, and no other one was started.
        """
        if self._options.cluster == "debug":
            return self._run_in_this_process()
        with Terminal() as terminal:
            while True:
                ready = [] if terminal.signals or self._interruptions else self._ready()
                for node, head in ready:
                    if not terminal.signals:
                        self._start(node, head, terminal)
                if self._running:
                    key, last = terminal.wait()
                    self._finish(self._running.pop(key), last)
                elif not ready:
                    break
            if terminal.signals and self._waiting and not self._interruptions:
                head = self._head(next(iter(self._waiting.values())))
                self._interruptions.append(f"{head} was not started: {terminal.signals[0]}")
        if self._interruptions:
            raise Interrupted("\n".join(self._interruptions))
        return self._status

    def _run_in_this_process(self) -> int:
        while ready := self._ready():
            node, head = ready[0]
            if reason := interrupt.stop_requested():
                raise Interrupted(f"{head} was not started: {reason}")
            print(f"{head} -> {short(node.spec.folder)}", flush=True)
            self._waiting.pop(node.key)
            started = time.monotonic()
            try:
                node.spec.mark("begun")
                execute(node.spec, self._options)
            except (StageFailed, UserError) as failure:
                self._fail(node, head, failure)
            else:
                print(f"{head}: {time.monotonic() - started:.0f} s", flush=True)
        return self._status

    def _ready(self) -> list[tuple[Node, str]]:
        """The stages that can start now, with how their lines begin; complete and lost ones are named and dropped."""
        found: list[tuple[Node, str]] = []
        free, places = len(self._free_gpus), (self._options.parallel or 1) - len(self._running)
        for node in list(self._waiting.values()):
            if len(found) >= places:
                break
            head = self._head(node)
            if broken := next((parent for parent in node.parents if parent in self._failed), None):
                self._failed[node.key] = self._failed[broken]
                print(f"{head}: skipped, because {self._failed[broken]} failed", file=sys.stderr, flush=True)
                self._waiting.pop(node.key)
            elif node.key not in self._missing:
                print(f"{head}: already complete", flush=True)
                self._waiting.pop(node.key)
            elif not any(parent in self._waiting or parent in self._running for parent in node.parents):
                free -= self._gpus(node)
                if free < 0 and (found or self._running):
                    break  # it is next in line for the GPUs that the others have
                found.append((node, head))
        return found

    def _start(self, node: Node, head: str, terminal: Terminal) -> None:
        print(f"{head} -> {short(node.spec.folder)}", flush=True)
        self._waiting.pop(node.key)
        count = self._gpus(node)
        gpus, self._free_gpus = self._free_gpus[:count], self._free_gpus[count:]
        running = _Running(node, head, time.monotonic(), gpus)
        try:
            node.spec.mark("begun")
            shares = self._options.gpus is not None or (self._options.parallel or 1) > 1
            visible = gpus if shares else None
            (job,) = submit([node.spec], self._options, is_warm=len(self._missing) > 1, gpus=visible)
        except UserError as error:
            self._free_gpus = gpus + self._free_gpus
            self._fail(node, head, error)
            return
        self._running[node.key] = running
        prefix = f"{node.key}: " if (self._options.parallel or 1) > 1 else ""
        terminal.add(node.key, Path(node.spec.folder), job, prefix)

    def _finish(self, running: _Running, last: dict[str, Any]) -> None:
        self._free_gpus = running.gpus + self._free_gpus
        if "interrupted" in last:
            self._interruptions.append(last["interrupted"])
            return
        try:
            raise_if_not_done(running.node.spec, last)
        except StageFailed as failure:
            self._fail(running.node, running.head, failure)
        else:
            print(f"{running.head}: {time.monotonic() - running.started:.0f} s", flush=True)

    def _fail(self, node: Node, head: str, failure: StageFailed | UserError) -> None:
        self._failed[node.key] = node.key
        self._status = self._status or getattr(failure, "status", 2)
        text = str(failure) if isinstance(failure, StageFailed) else f"error: {failure}"
        print(f"{text}\n{head}: failed; the other branches continue", file=sys.stderr, flush=True)

    def _head(self, node: Node) -> str:
        return f"[{self._graph.nodes.index(node) + 1}/{len(self._graph.nodes)}] {node.key}"

    def _gpus(self, node: Node) -> int:
        return self._options.fitting(node.spec).gpus_per_node


def short(path: str) -> str:
    """A path relative to the working folder, where that is above it."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
