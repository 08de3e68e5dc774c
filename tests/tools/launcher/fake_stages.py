"""Stages that do next to nothing, for tests of the launcher: importable by a job, as real ones are."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.files import atomic_write, write_json
from pretrain.common.interrupt import Stopped
from pretrain.common.run.state import RunContext
from tools.stages.base import Stage
from tools.stages.registry import register


@register
class Fake(Stage):
    """A stage that calls a function of this module."""

    name = "fake"
    has_config = False

    @dataclass(frozen=True)
    class Options:
        function: str = "count"
        arguments: tuple[Any, ...] = (1,)

    def run(self, context: RunContext) -> Any:
        function: Callable[..., Any] = globals()[self.options.function]
        options = {"context": context} if function is count else {}
        return function(self.folder, *self.options.arguments, **options)


@register
class FakeAlone(Fake):
    """A stage of a single process."""

    name = "fake_alone"
    one_process = True


@register
class FakeOnCpu(Fake):
    """A stage of a single process that uses no GPU."""

    name = "fake_on_cpu"
    one_process = True
    gpu = False
    most_minutes = 30


@register
class FakeTraining(Fake):
    """A stage on whose checkpoint others build."""

    name = "fake_training"
    trains_backbone = True

    def reads_weights(self) -> bool:
        return not self.has_checkpoint()


def count(
    folder: str, steps: int, seconds: float = 0.0, extra: str = "", deaf: bool = False, *, context: RunContext
) -> dict[str, Any]:
    """Count to ``steps``; the count is its checkpoint. With ``deaf``, it never checks for a request to stop."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    place = Path(folder) / f"count.{os.environ.get('RANK', '0')}"
    done = int(place.read_text()) if place.exists() else 0
    print(f"counting from {done}", flush=True)
    with open(Path(folder) / f"steps.{os.environ.get('RANK', '0')}", "a") as log:
        for step in range(done, steps):
            time.sleep(seconds)
            log.write(f"{step}\n")
            log.flush()
            atomic_write(place, str(step + 1))
            if context.stop.reason and step + 1 < steps and not deaf:
                raise Stopped(f"{context.stop.reason}: counted to {step + 1}")
    results = {"stage": "fake", "metrics": {"count": steps}, "extra": extra, "ranks": _ranks()}
    results["port"] = os.environ.get("MASTER_PORT", "")
    if os.environ.get("RANK", "0") == "0":
        write_json(Path(folder) / "results.json", results)
    return results


def fail(folder: str, rank: int = 0, user_error: bool = False) -> None:
    """Fail at once on one rank; the others would wait for an hour."""
    if int(os.environ.get("RANK", "0")) == rank:
        if user_error:
            raise UserError("the value is 3; it must be 2")
        raise RuntimeError(f"rank {rank} cannot go on")
    time.sleep(3600)


def meet(folder: str, other: str) -> None:
    """Succeed if the stage in the folder ``other`` runs at the same time; record its GPUs."""
    atomic_write(Path(folder) / "here", "")
    deadline = time.monotonic() + 60
    while not (Path(other) / "here").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing runs in {other}")
        time.sleep(0.02)
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    write_json(Path(folder) / "results.json", {name: os.environ.get(name) for name in names})


def list_data(folder: str, place: str) -> None:
    """Write what each rank finds in ``place``, whose variables are expanded here."""
    found = Path(os.path.expandvars(place))
    atomic_write(Path(folder) / f"data.{os.environ['RANK']}", " ".join([str(found), *os.listdir(found)]))
    if os.environ["RANK"] == "0":
        write_json(Path(folder) / "results.json", {})


def hang(folder: str) -> None:
    """Wait for an hour; write the process ids to the run folder."""
    atomic_write(Path(folder) / f"pid.{os.environ['RANK']}", str(os.getpid()))
    time.sleep(3600)


def _ranks() -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
