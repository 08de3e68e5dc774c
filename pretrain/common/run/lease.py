"""The folder lease: one owner per run folder, named in a small file that is created exclusively and touched every 10 s.

On its own machine an owner is alive while its process is running; seen from other machines, while it touches its file.
A lease never ends a live run. (A file lock, `files.hold_lock`, makes the processes of one machine wait for each other.)

filelock's SoftFileLease is not used: a process killed between the creation of its file and the writing of its name
would keep the folder forever, and an owner on another machine, or in a container that has been removed, would be
waited for 90 s however long ago it was last alive.
"""

import contextlib
import glob
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import build_write_error, make_folder, remove_unfinished


@dataclass(frozen=True)
class LeaseTimes:
    """How often an owner touches its file, and when others take it for dead, in seconds.

    Attributes:
        touch_period_s: between two touches of the owner.
        dead_after_s: without a touch until another machine takes the owner for dead; a file server may show a touch
            60 s late.
        nameless_after_s: until a file that is still empty belongs to a process that was killed.
    """

    touch_period_s: float = 10.0
    dead_after_s: float = 90.0
    nameless_after_s: float = 5.0


_TIMES = LeaseTimes()


@contextlib.contextmanager
def claim(folder: str | Path, purpose: str, *, file: str = "", times: LeaseTimes = _TIMES) -> Iterator[None]:
    """Claim ``folder``, or only ``file`` in it, for this process until the block ends; ``purpose`` says what for.

    A SLURM job waits until an owner on another machine has touched its file again or is known to be dead: it may have
    been killed with its node a moment ago.

    Raises:
        UserError: a live process, which the message names, has claimed it, or the folder cannot be written.
    """
    make_folder(folder)
    pid = os.getpid()
    process = {"host": socket.gethostname(), "pid": pid, "started": read_start_time(pid)}
    record = {**process, "machine": _identify_machine(), "job": _read_job(), "purpose": purpose}
    path = _create(Path(folder), file, record, times)
    released = threading.Event()
    threading.Thread(target=_touch, args=(path, released, times.touch_period_s), daemon=True).start()
    try:
        yield
    finally:
        released.set()
        if os.getpid() == pid and _read(path) == record:  # not in a child that unwinds the same stack
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def find_owner(folder: str | Path) -> dict[str, Any]:
    """Return the live owner's record (``purpose``, ``host``, ``pid``, ...), as far as this machine can tell, or {}."""
    owners = {path: _read(path) for path in _list_owners(Path(folder), "")}
    return next((owner for path, owner in owners.items() if not _is_dead(path, owner, _TIMES)), {})


def read_start_time(pid: int) -> str:
    """Return the start time of a process of this machine in the kernel's units; empty if it is not running."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return "" if state in "ZX" else fields[18]
    return ""


def _create(folder: Path, file: str, record: dict[str, Any], times: LeaseTimes) -> Path:
    """Create the file with the next number once every earlier owner is known to be dead; return its path."""
    while True:
        owners = _list_owners(folder, file)
        for path in owners:
            owner = _read(path)
            touched = _read_touch_time(path)
            while not _is_dead(path, owner, times):
                is_elsewhere = owner.get("machine") != _identify_machine() and owner.get("job") != _read_job()
                may_be_lost = _read_job()[0] and is_elsewhere and _read_touch_time(path) == touched
                if owner and not may_be_lost:
                    wait = f"wait for it ({times.dead_after_s:.0f} s if it was killed on another machine)"
                    problem = f"{folder / file} is in use: {_describe(owner)}"
                    raise UserError(f"{problem}; {wait}, stop it, or choose another folder")
                time.sleep(0.1)  # it is about to touch the file or to write its name, or was killed before that
                owner = _read(path)
        number = 1 + max((int(path.suffixes[-2][1:]) for path in owners), default=0)
        owner_file = folder / f".{file}{'.' if file else ''}owner.{number}.json"
        try:
            with open(owner_file, "x") as opened:
                opened.write(json.dumps(record))
            earlier = [path for path in _list_owners(folder, file) if path != owner_file]
            if all(_is_dead(path, _read(path), times) for path in earlier):
                for path in earlier:
                    path.unlink(missing_ok=True)
                remove_unfinished(folder, file)
                return owner_file
            owner_file.unlink()  # another process came in between
            time.sleep(random.SystemRandom().uniform(0.05, 0.15))  # leaves the seeded streams alone
        except FileExistsError:  # another process was faster
            continue
        except FileNotFoundError:  # it has removed the empty folder
            make_folder(folder)
        except OSError as error:  # a full disk, or another user's file
            if not _read(owner_file):
                with contextlib.suppress(OSError):
                    owner_file.unlink(missing_ok=True)
            raise build_write_error(owner_file, error) from error


def _touch(path: Path, released: threading.Event, period_s: float) -> None:
    while not released.wait(period_s):
        with contextlib.suppress(OSError):  # a file server that does not answer now may answer the next time
            os.utime(path)


def _read_touch_time(path: Path) -> float:
    """Return when the owner has touched its file; 0.0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _list_owners(folder: Path, file: str) -> list[Path]:
    return list(folder.glob(f".{glob.escape(file)}{'.' if file else ''}owner.*.json"))


def _read(path: Path) -> dict[str, Any]:
    """Read an owner's record; {} if the file is gone, or empty because the disk was full."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    except OSError:  # too many open files, a file server that does not answer, another user's file
        return {"purpose": "a run"}


def _describe(owner: dict[str, Any]) -> str:
    job = f", SLURM job {owner['job'][0]}" if owner.get("job", [""])[0] else ""
    host = owner.get("host", "another machine")
    return f"{owner.get('purpose', 'a run')} on {host}, process {owner.get('pid', '?')}{job}"


def _read_job() -> list[str]:
    """Return the number of the SLURM job and of its attempt."""
    return [os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")]


def _identify_machine() -> str:
    """Identify the machine since its last boot and the container; within it, process ids are unique."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def _is_dead(path: Path, owner: dict[str, Any], times: LeaseTimes) -> bool:
    if owner.get("machine") and owner["machine"] == _identify_machine():
        return read_start_time(owner["pid"]) != owner["started"]
    if owner.get("job", [""])[0] and owner["job"][0] == _read_job()[0] and owner["job"] != _read_job():
        return True  # an earlier attempt of this job, which has ended
    now = time.time()
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as file:
        now = os.fstat(file.fileno()).st_mtime  # by the file server's clock, as it dates the touches
    try:
        return now - path.stat().st_mtime > (times.dead_after_s if owner else times.nameless_after_s)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
