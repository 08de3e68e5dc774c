"""One owner per run folder: two runs that write to the same folder would destroy each other's work.

The owner is a small file in the folder, ``.owner.<n>.json``, that names the process. It is created exclusively, which
every file system that clusters use does atomically, and touched every few seconds, so that any machine can tell a
live owner from a dead one:

- on the owner's own machine by its process,
- elsewhere by the age of the last touch, as the file server dates it (the clocks of two machines may differ),
- at once where the owner was an earlier attempt of this SLURM job, which must have ended for this one to run.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError
from .run_folder import cannot_write, make_folder, remove

_TOUCH_PERIOD_S = 10.0
_DEAD_AFTER_S = 90.0  # without a touch; long enough for an owner on a stalled file server
_NAMELESS_AFTER_S = 5.0  # an owner that has not written its name by then was killed as it began
_RESTARTS = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")  # the same in every attempt of a requeued job


@contextlib.contextmanager
def claim(folder: str | Path, work: str, *, of: str = "") -> Iterator[None]:
    """Holds ``folder`` for this process until the block ends.

    With several ranks, rank 0 holds it for all of them: call it through `process_group.on_first_rank`.

    Args:
        work: what the owner does, for the message to those that it refuses ("pretraining", "linear probe").
        of: the name of a file in ``folder``; then only that file is held.

    Raises:
        UserError: a live process, which the message names, holds it, or the folder cannot be written.
    """
    owner = _Owner(Path(folder), work, of)
    try:
        yield
    finally:
        owner.release()


def remove_dead(folder: str | Path, of: str = "") -> None:
    """Removes the files of killed owners on this machine; other machines would wait until they are old. See `claim`."""
    me = _identity()
    for path in Path(folder).glob(f"{glob.escape(_prefix(of))}.*.json"):
        owner = _read(path)
        if owner.get("place") == me["place"] and _is_dead(owner, me, silent_s=0):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def holder(folder: str | Path) -> dict[str, Any]:
    """Who holds ``folder``, as far as this machine can tell: ``work``, ``host``, ``pid``, ...; {} if nobody does."""
    me = _identity()
    for path in Path(folder).glob(f"{_prefix('')}.*.json"):
        with contextlib.suppress(FileNotFoundError):  # by this machine's clock: the folder may be read-only here
            owner, silent_s = _read(path), time.time() - path.stat().st_mtime
            if not _is_dead(owner, me, silent_s):
                return owner
    return {}


class _Owner:
    def __init__(self, folder: Path, work: str, of: str) -> None:
        self._folder, self._of = folder, of
        self._held = folder / of if of else folder
        self._me = {**_identity(), "work": work, "token": uuid.uuid4().hex, "since": time.time()}
        self._released = threading.Event()
        make_folder(folder)
        self._path = self._take()
        threading.Thread(target=self._touch, daemon=True).start()

    def release(self) -> None:
        self._released.set()
        if self._is_mine(self._path):
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _take(self) -> Path:
        """Creates the next file in number once every earlier owner is known to be dead; returns its path."""
        prefix = _prefix(self._of)
        pattern = f"{glob.escape(prefix)}.*.json"
        while True:
            dead = {path: _read(path).get("token") for path in self._folder.glob(pattern)}
            for path in dead:
                self._refuse_if_alive(path)
            mine = self._folder / f"{prefix}.{max(map(_number, dead), default=0) + 1}.json"
            try:
                with open(mine, "x") as file:
                    file.write(json.dumps(self._me))
            except FileExistsError:  # another process was faster: look again
                continue
            except OSError as error:
                if self._is_mine(mine) or not _read(mine):
                    with contextlib.suppress(OSError):
                        mine.unlink(missing_ok=True)
                raise cannot_write(mine, error) from error
            others = [path for path in self._folder.glob(pattern) if path != mine]
            if all(path in dead and dead[path] == _read(path).get("token") for path in others):
                unfinished = f".{glob.escape(self._of) or '*'}.*.tmp*"  # what a killed owner was writing
                for path in (*others, *self._folder.glob(unfinished)):
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:  # another user's, in a folder that lets only the owner remove a file
                        with contextlib.suppress(OSError):
                            mine.unlink(missing_ok=True)
                        raise cannot_write(path, error) from error
                return mine
            remove(mine)  # another process came in between
            time.sleep(random.SystemRandom().uniform(0.05, 0.15))  # leaves the seeded streams alone

    def _refuse_if_alive(self, path: Path) -> None:
        named_by = time.monotonic() + 2 * _NAMELESS_AFTER_S  # on a full disk, nothing tells how old a file is
        while True:
            owner, silent_s = _read(path), _seconds_since_touch(path)
            if silent_s is None or _is_dead(owner, self._me, silent_s):
                return
            if not owner and time.monotonic() < named_by:  # it should have a name in a moment
                time.sleep(0.2)
                continue
            if owner.get("place") == self._me["place"] or silent_s < 2 * _TOUCH_PERIOD_S:
                break
            time.sleep(1)  # on another machine, and silent for some time: wait until it is clear
        job = f", SLURM job {owner['job'].split('/')[-1]}" if owner.get("job") else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.get("since", time.time())))
        raise UserError(
            f"{self._held} is in use: {owner.get('work', 'a run')} on {owner.get('host', 'another machine')}, process "
            f"{owner.get('pid', '?')}{job}, since {since}; wait for it, stop it, or choose another folder"
        )

    def _touch(self) -> None:
        while not self._released.wait(_TOUCH_PERIOD_S):
            with contextlib.suppress(OSError):  # a file server that does not answer now may answer the next time
                os.utime(self._path)

    def _is_mine(self, path: Path) -> bool:
        return _read(path).get("token") == self._me["token"]


def _prefix(of: str) -> str:
    return f".{of}.owner" if of else ".owner"


def _identity() -> dict[str, Any]:
    """Who this process is: host, the place within which its id is unique, id, start, SLURM job and attempt."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    place = [socket.gethostname(), boot.read_text().strip() if boot.is_file() else ""]
    with contextlib.suppress(OSError):  # each container on a machine numbers its own processes
        place.append(str(os.stat("/proc/self/ns/pid").st_ino))
    job = "/".join(os.environ.get(name, "") for name in _RESTARTS)
    return {
        "host": socket.gethostname(), "place": " ".join(place), "pid": os.getpid(), "started": start_of(os.getpid()),
        "job": job if os.environ.get("SLURM_JOB_ID") else "", "attempt": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }  # fmt: skip


def _is_dead(owner: dict[str, Any], me: dict[str, Any], silent_s: float) -> bool:
    if owner.get("place") == me["place"] and owner.get("started"):  # without /proc it has none: its age decides
        return start_of(owner["pid"]) != owner["started"]
    if owner.get("job") and owner["job"] == me["job"] and owner["attempt"] != me["attempt"]:
        return True
    return silent_s > (_DEAD_AFTER_S if owner else _NAMELESS_AFTER_S)


def start_of(pid: int) -> str:
    """When a process of this machine began, in the kernel's units; empty if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _seconds_since_touch(path: Path) -> float | None:
    """By the file server's clock, or None if the file is gone."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError:
        return 0.0  # unknown: never take it for dead


def _read(path: Path) -> dict[str, Any]:
    """What an owner wrote; {} if the file is gone, or has nothing or only a part in it."""
    try:
        value = json.loads(path.read_text())
    except PermissionError:
        return {"work": "a run of another user"}
    except (FileNotFoundError, ValueError):
        return {}
    except OSError:  # too many open files, a file server that does not answer: says nothing about the owner
        return {"work": "a run"}
    return value if isinstance(value, dict) else {}


def _number(path: Path) -> int:
    match = re.search(r"\.(\d+)\.json$", path.name)
    return int(match.group(1)) if match else 0
