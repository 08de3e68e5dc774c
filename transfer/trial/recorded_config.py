"""A config that records which of its keys are read, in order."""

from typing import Any

from fvcore.common.config import CfgNode


class Reads(list[str]):
    """Names of keys in the order in which they were read; copies of a config share one object."""

    def __deepcopy__(self, memo: Any) -> "Reads":
        return self

    def latest_first(self) -> list[str]:
        """Return each key once, the one read last first."""
        return list(dict.fromkeys(reversed(self)))


class RecordedConfig(CfgNode):
    """A config, or a section of it, that appends the name of each key that is read to ``reads``."""

    def __getitem__(self, name: Any) -> Any:
        value = super().__getitem__(name)
        if not isinstance(value, CfgNode):
            attributes = self.__dict__  # `CfgNode` makes keys of others
            attributes["_reads"].append(f"{attributes['_prefix']}{name}")
        return value


def record_reads(cfg: CfgNode, reads: Reads, prefix: str = "") -> RecordedConfig:
    """Return a copy of ``cfg`` that appends to ``reads``; ``prefix`` is the name of the section, with a dot."""
    recorded = RecordedConfig()
    recorded.__dict__.update(cfg.__dict__, _reads=reads, _prefix=prefix)
    for name, value in cfg.items():
        is_section = isinstance(value, CfgNode)
        dict.__setitem__(recorded, name, record_reads(value, reads, f"{prefix}{name}.") if is_section else value)
    return recorded
