"""Weights & Biases, fed from the lines of metrics.json, where P2T_LOGGERS is ``wandb``.

It reads its own variables: WANDB_PROJECT, WANDB_MODE=offline, ...
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .errors import UserError, one_line
from .run_folder import read_json, write_json

log = logging.getLogger("pretrain.loggers")
VARIABLE, RECORD = "P2T_LOGGERS", "loggers.json"
_PROJECT = "pretrain-to-transfer"


class _Run(NamedTuple):
    """A run that a logger has opened, by its id there; ``send`` takes an iteration and name -> value."""

    id: str
    send: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], Any]


def wanted() -> list[str]:
    """The loggers that P2T_LOGGERS names: none, or wandb.

    Raises:
        UserError: an unknown name, or wandb is not installed.
    """
    name = os.environ.get(VARIABLE, "").strip()
    if name not in ("", "wandb"):
        raise UserError(f"{VARIABLE} is {name!r}; the only logger is wandb")
    if name and importlib.util.find_spec(name) is None:
        raise UserError(f"{VARIABLE} names wandb, which is not installed; run: pip install wandb")
    return [name] if name else []


class Loggers:
    """Sends every number in metrics.json once to each logger, also over several resumes.

    The run folder's loggers.json keeps each logger's run, and the last iteration of each metric that was sent. A logger
    that fails is dropped with one warning. A resumed run tries again, and sends what is missing.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self._folder, self._read = Path(output_dir), 0  # bytes of metrics.json
        self._names = wanted()
        self._open: dict[str, _Run] = {}
        self._record: dict[str, Any] = {}
        with contextlib.suppress(UserError):  # the first start
            self._record = read_json(self._folder / RECORD)

    def update(self) -> None:
        """Sends the lines that were added to metrics.json since the last call."""
        path = self._folder / "metrics.json"
        if not self._names or not path.is_file():  # a run that ended before its first line has none
            return
        with open(path, "rb") as file:
            file.seek(self._read)
            lines = [line for line in file if line.endswith(b"\n")]
        self._read += sum(map(len, lines))
        numbers = [_numbers(json.loads(line)) for line in lines]
        for name in list(self._names):
            try:
                self._send(name, numbers)
            except Exception as error:  # whatever the library raises
                self._drop(name, error)

    def close(self) -> None:
        """Ends the loggers' runs, which a resumed run continues."""
        for name, run in list(self._open.items()):
            try:
                run.close()
            except Exception as error:
                self._drop(name, error)
        self._open.clear()

    def _send(self, name: str, lines: list[tuple[int, dict[str, float]]]) -> None:
        kept = self._record.setdefault(name, {"run": "", "sent": {}})
        before, after = dict(kept["sent"]), dict(kept["sent"])
        new: list[tuple[int, dict[str, float]]] = []
        for iteration, values in lines:
            values = {key: value for key, value in values.items() if iteration > after.get(key, -1)}
            after |= dict.fromkeys(values, iteration)
            new += [(iteration, values)] if values else []
        if not new:
            return
        if name not in self._open:
            self._open[name] = _OPEN[name](self._folder, kept["run"])
            kept["run"] = self._open[name].id
        # Recorded first: if the process is killed in between, a number is missing, and none is there twice.
        self._keep(kept, after)
        for iteration, values in new:
            try:
                self._open[name].send(iteration, values)
            except Exception:
                self._keep(kept, before)
                raise
            before |= dict.fromkeys(values, iteration)

    def _keep(self, kept: dict[str, Any], sent: Mapping[str, int]) -> None:
        kept["sent"] = dict(sent)
        write_json(self._folder / RECORD, self._record)

    def _drop(self, name: str, error: Exception) -> None:
        self._names.remove(name)
        self._open.pop(name, None)
        reason = one_line(error)[:300]
        log.warning(f"{name} failed: {reason}; the run continues without it, and sends what is missing when resumed")


def _numbers(line: dict[str, Any]) -> tuple[int, dict[str, float]]:
    numbers = ((key, value) for key, value in line.items() if isinstance(value, (int, float)))
    return line["iteration"], {key: float(value) for key, value in numbers if key != "iteration"}


def _about(folder: Path) -> tuple[str, dict[str, Any]]:
    """The run's name to people, and its config."""
    config = folder / "config.yaml"
    return "/".join(folder.absolute().parts[-2:]), yaml.safe_load(config.read_text()) if config.is_file() else {}


def _wandb(folder: Path, run: str) -> _Run:
    import wandb

    run, (name, config) = run or uuid.uuid4().hex[:8], _about(folder)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT), id=run, name=name, config=config, dir=str(folder),
        resume="allow", reinit="create_new", settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip
    # Not W&B's own step: it refuses numbers of an earlier one, such as the kNN of a checkpoint that is resumed.
    opened.define_metric("*", step_metric="iteration")
    return _Run(run, lambda iteration, values: opened.log({"iteration": iteration, **values}), opened.finish)


_OPEN = {"wandb": _wandb}
