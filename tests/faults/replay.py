"""What a disk may hold after a crash at any moment of a recorded run (see syscalls.c)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Call:
    """A call that has succeeded: create | write | truncate | fsync | rename | link | unlink | mkdir | rmdir."""

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
class _Node:
    """A file or a folder: what it holds now, and what it held when it was last synced."""

    is_folder: bool = False
    data: bytearray = field(default_factory=bytearray)
    synced_data: bytes = b""
    names: dict[str, _Node] = field(default_factory=dict)
    synced_names: dict[str, _Node] = field(default_factory=dict)


class Disk:
    """A disk that keeps what was synced; of the rest it may have lost the data, or the names as well."""

    KINDS = ("all is kept", "data are lost", "data and names are lost")

    def __init__(self, root: Path) -> None:
        self._root, self._top = PurePosixPath(root), _Node(is_folder=True)

    def apply(self, call: Call) -> None:
        folder, name = self._at(call.path)
        node = folder.names.get(name)
        if call.name == "mkdir":
            folder.names[name] = _Node(is_folder=True)
        elif call.name == "create":
            folder.names[name] = _Node()
        elif call.name in ("unlink", "rmdir"):
            folder.names.pop(name, None)
        elif call.name in ("rename", "link"):
            target, target_name = self._at(call.other)
            if node is not None:
                target.names[target_name] = node
                if call.name == "rename":
                    del folder.names[name]
        elif call.name == "fsync" and PurePosixPath(call.path) == self._root:
            self._top.synced_names = dict(self._top.names)
        elif node is None:
            return  # it was there before the record began, or its name is gone
        elif call.name == "fsync":
            node.synced_data, node.synced_names = bytes(node.data), dict(node.names)
        elif call.name == "truncate":
            del node.data[call.offset :]
        elif call.name == "write":
            node.data[len(node.data) :] = bytes(max(0, call.offset - len(node.data)))
            node.data[call.offset : call.offset + len(call.data)] = call.data

    def write(self, folder: Path, kind: str) -> None:
        """Makes ``folder`` what a crash may leave."""
        shutil.rmtree(folder, ignore_errors=True)
        self._write(self._top, folder, kind)

    def _write(self, node: _Node, path: Path, kind: str) -> None:
        if not node.is_folder:
            path.write_bytes(node.data if kind == self.KINDS[0] else node.synced_data)
            return
        path.mkdir()
        for name, child in (node.synced_names if kind == self.KINDS[2] else node.names).items():
            self._write(child, path / name, kind)

    def _at(self, path: str) -> tuple[_Node, str]:
        """The folder that a path is in, and its name there."""
        *folders, name = PurePosixPath(path).relative_to(self._root).parts or ("",)
        node = self._top
        for part in folders:
            node = node.names.setdefault(part, _Node(is_folder=True))
        return node, name


def crashes(calls: list[Call], root: Path, folder: Path) -> Iterator[tuple[int, str]]:
    """Makes ``folder`` each state that a crash after each call may leave; yields the number of calls and the kind."""
    disk = Disk(root)
    for number, call in enumerate(calls, start=1):
        disk.apply(call)
        for kind in Disk.KINDS:
            disk.write(folder, kind)
            yield number, kind
