"""A config that records which of its keys are read."""

from __future__ import annotations

from typing import Any, ClassVar

from fvcore.common.config import CfgNode


class RecordingNode(CfgNode):
    """A section of a config; copies of it record, too. Printing or saving the config reads no key."""

    reads: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> Any:
        self._record(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._record(name)
        return super().get(name, default)

    def _record(self, name: str) -> None:
        self.reads.add(self.__dict__.get("section", "") + name)


def record_reads(cfg: CfgNode, section: str = "") -> RecordingNode:
    """Returns a copy of ``cfg`` that adds each key that is read to `RecordingNode.reads`."""
    node = RecordingNode()
    for name, value in cfg.items():
        node[name] = record_reads(value, f"{section}{name}.") if isinstance(value, CfgNode) else value
    node.__dict__["section"] = section
    if cfg.is_frozen():
        node.freeze()
    return node
