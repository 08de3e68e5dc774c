"""What a disk may hold after a crash at any moment of a recorded run (see syscalls.c)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """A call that has succeeded: create | write | fsync | rename | unlink, and what syscalls.c records besides."""

    name: str
    path: str
    other: str
    offset: int
    data: bytes


def read_calls(log: Path) -> list[Call]:
    """The calls of a record, in their order."""
    calls, rest = [], log.read_bytes()
    while rest:
        head, _, rest = rest.partition(b"\n")
        name, path, other, offset, size = head.decode().split("\t")
        calls.append(Call(name, path, other, int(offset), rest[: int(size)]))
        rest = rest[int(size) :]
    return calls


@dataclass
class _File:
    """What a file holds now, and what it held when it was last synced."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


class Disk:
    """A folder on a disk that keeps what was synced; of the rest it may have lost the data, or the names, too."""

    KINDS = ("all is kept", "data are lost", "data and names are lost")

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: dict[str, _File] = {}
        self._synced: dict[str, _File] = {}  # under which names, when the folder was last synced

    def apply(self, call: Call) -> None:
        name = Path(call.path).name
        if call.path == self._root and call.name == "fsync":
            self._synced = dict(self._files)
        elif call.name == "create":
            self._files[name] = _File()
        elif call.name == "unlink":
            del self._files[name]
        elif call.name == "rename":
            self._files[Path(call.other).name] = self._files.pop(name)
        elif call.name == "fsync":
            self._files[name].synced = bytes(self._files[name].data)
        elif call.name == "write":
            data, end = self._files[name].data, call.offset + len(call.data)
            data.extend(bytes(max(0, end - len(data))))
            data[call.offset : end] = call.data
        else:
            raise AssertionError(f"{call.name} of {call.path} is not simulated")

    def write(self, folder: Path, kind: str) -> None:
        """Makes ``folder`` what a crash may leave."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, file in (self._synced if kind == self.KINDS[2] else self._files).items():
            (folder / name).write_bytes(file.data if kind == self.KINDS[0] else file.synced)


def crashes(calls: list[Call], root: Path, folder: Path) -> Iterator[tuple[int, str]]:
    """Makes ``folder`` each state that a crash after each call may leave; yields the number of calls and the kind."""
    disk = Disk(root)
    for number, call in enumerate(calls, start=1):
        disk.apply(call)
        for kind in Disk.KINDS:
            disk.write(folder, kind)
            yield number, kind
