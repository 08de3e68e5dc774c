"""File system calls of Python that fail, end the process or are recorded, on demand.

Opens, renames, removals, links and new folders are audit events, which Python raises before the call; the writes of
files and `os.fsync` are replaced. What C++ writes by itself (`cv2.imwrite`) is not seen.
"""

import builtins
import io
import itertools
import os
import pickle
import sys
from dataclasses import dataclass, field
from typing import Any

_EVENTS = {"os.remove": "unlink", "os.rmdir": "unlink", "os.mkdir": "mkdir", "os.rename": "rename", "os.link": "link"}
_OPEN = io.open
_FSYNC = os.fsync


@dataclass(frozen=True)
class Fault:
    """A fault at the ``nth`` call (from 1) of ``call`` on a path that contains ``part``.

    Attributes:
        action: count | record | fail from (that call on) | signal.
        call: open | write | fsync | rename | link | unlink | mkdir. Empty: any.
        value: the error or the signal.
    """

    action: str = "count"
    nth: int = 0
    call: str = ""
    part: str = ""
    value: int = 0


@dataclass(frozen=True)
class Call:
    """A recorded call: create | write | fsync | rename | unlink; a rename also has its source, a write its data."""

    name: str
    path: str
    source: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Report:
    """The calls that a process counted and recorded, and the child processes it had when the fault killed it."""

    calls: int = 0
    recorded: list[Call] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


class Injector:
    """Applies one fault to the calls of this process on paths that start with ``folder``."""

    def __init__(self, folder: str, fault: Fault, report_file: str = os.devnull) -> None:
        self._folder = folder
        self._fault = fault
        self._report_file = report_file
        self._numbers = itertools.count(1)  # threads draw from it without a lock
        self.report = Report()

    def install(self) -> None:
        """Watch this process until it ends."""
        sys.addaudithook(self._audit)
        builtins.open = io.open = self._open
        os.fsync = self._fsync

    def meet(self, name: str, path: str | bytes | os.PathLike, **details: Any) -> None:
        """Count a call before it is made; raise the error, or end the process, if the fault says so."""
        full = os.path.abspath(os.fsdecode(path))
        fault = self._fault
        if not full.startswith(self._folder):
            return
        if fault.action == "record":
            self.report.recorded.append(Call(name, full, **details))
        if fault.call not in ("", name) or fault.part not in full:
            return
        number = self.report.calls = next(self._numbers)
        if fault.action == "fail from" and number >= fault.nth:
            raise OSError(fault.value, os.strerror(fault.value), full)
        if fault.action == "signal" and number == fault.nth:
            self.write_report()
            os.kill(os.getpid(), fault.value)

    def write_report(self) -> None:
        """Write what has been counted until now, past the fault."""
        self.report.children = [int(pid) for pid in _OPEN("/proc/thread-self/children").read().split()]
        descriptor = os.open(self._report_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, pickle.dumps(self.report))
        os.close(descriptor)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path, _, flags = arguments
            changes = flags & (os.O_WRONLY | os.O_RDWR)
            if self._fault.action == "record" and changes and not os.path.exists(path):
                self.meet("create", path)
            if changes:
                self.meet("open", path)
        elif event in ("os.rename", "os.link"):
            self.meet(_EVENTS[event], arguments[1], source=os.fsdecode(arguments[0]))
        elif event in _EVENTS:
            self.meet(_EVENTS[event], arguments[0])

    def _fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        self.meet("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        _FSYNC(descriptor)

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **more: Any) -> Any:
        """Open a file as `open` does; count the writes of one that is named and can be written."""
        if isinstance(file, int) or more.get("opener") or not set(mode) & set("wxa+"):
            return _OPEN(file, mode, buffering, *text, **more)
        raw = _File(self, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, *text, **more, line_buffering=buffering == 1)


class _File(io.FileIO):
    """A file whose writes the injector sees."""

    def __init__(self, injector: Injector, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self._injector = injector

    def write(self, data: Any) -> int:
        offset = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
        self._injector.meet("write", self.name, offset=offset, data=bytes(data))
        return super().write(data)
