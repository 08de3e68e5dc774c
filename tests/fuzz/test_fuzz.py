"""Mutated files: a right answer or one line, and never a traceback, a hang, a crash or more than 2 GiB.

The ordinary suite reads fifty files per reader, and every file in found/ that was once answered wrongly; the
slow one reads 10,000 per reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import time
import traceback
from pathlib import Path

import pytest

from pretrain.common.errors import UserError, one_line
from tests.fuzz.targets import Target, targets

NAMES = (
    "pretraining_config", "detector_config", "overrides", "pipeline", "sweep", "site", "launch.json", "results.json",
    "coco", "image", "checkpoint", "checkpoint_probe", "checkpoint_torchvision", "weights_pth",
    "weights_pkl", "weights_safetensors",
    "metrics.json",
)  # fmt: skip
FOUND = sorted((Path(__file__).parent / "found").glob("*/*"))
_SECONDS, _BYTES = 20, 2 << 30  # per input


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return targets(tmp_path_factory.mktemp("fuzz"))


def test_every_reader_is_named(known: dict[str, Target]):
    assert tuple(known) == NAMES


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_file_is_answered(known: dict[str, Target], name: str, count: int, tmp_path: Path):
    target, number, wrong = known[name], 0, {}
    while number < count and len(wrong) < 20:
        number, found = _in_a_process(target, name, number, count, tmp_path)
        wrong |= found
    first = {what: number for number, what in sorted(wrong.items(), reverse=True)}
    shown = "\n".join(f"{tmp_path / str(number)}: {what}" for what, number in list(first.items())[:20])
    assert not wrong, f"{len(wrong)} files, which `draw` gives with Random('{name} NUMBER'):\n{shown}"


@pytest.mark.parametrize("file", FOUND, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_a_file_that_was_once_answered_wrongly(known: dict[str, Target], file: Path, tmp_path: Path):
    assert _answer(known[file.parent.name], file.read_bytes(), tmp_path / "input") == ""


def _in_a_process(target: Target, name: str, first: int, last: int, folder: Path) -> tuple[int, dict[int, str]]:
    """Reads files ``first`` to ``last``, until one ends the process; returns the next number, and what was wrong."""
    at = mmap.mmap(-1, 8)  # the number of the file that is being read
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            _read_all(target, name, first, last, folder, at, report)
            status = 0
        os._exit(status)
    seen, since = -1, time.monotonic()
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        (number,) = struct.unpack("q", at[:8])
        if number != seen:
            seen, since = number, time.monotonic()
        if time.monotonic() - since > 2 * _SECONDS:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    found = {int(number): what for number, what in json.loads(report.read_text()).items()} if report.exists() else {}
    if ended[1] == 0:
        return last, found
    (number,) = struct.unpack("q", at[:8])
    content = target.draw(random.Random(f"{name} {number}"))
    (folder / str(number)).write_bytes(content)
    return number + 1, {**found, number: f"the process ended with status {os.waitstatus_to_exitcode(ended[1])}"}


def _read_all(target: Target, name: str, first: int, last: int, folder: Path, at: mmap.mmap, report: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES, used + _BYTES))
    wrong: dict[int, str] = {}
    for number in range(first, last):
        at[:8] = struct.pack("q", number)
        content = target.draw(random.Random(f"{name} {number}"))
        if what := _answer(target, content, folder / "input"):
            (folder / str(number)).write_bytes(content)
            wrong[number] = what
            report.write_text(json.dumps(wrong))


def _answer(target: Target, content: bytes, folder: Path) -> str:
    """What is wrong with how ``target`` reads a file of this content; empty: nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    file = folder / target.name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    began, before = time.monotonic(), os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            target.read(file)
    except UserError as error:
        text = str(error)
        if "not enough memory" in text:
            return "more than 2 GiB"
        return "" if text else "an error without a text"
    except MemoryError:
        return "more than 2 GiB"
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(at.filename).name}:{at.lineno}: {one_line(error)[:300]}"
    finally:
        os.chdir(before)
    return f"{time.monotonic() - began:.0f} seconds" if time.monotonic() - began > _SECONDS else ""
