"""Where weights come from: one record per file, whose earlier ones form a chain.

A record is written into converted files and next to them (FILE.json), into initial_weights.json of a run folder, and
into results.json. It is one flat JSON object, in which what a detector's config must have is under Detectron2's keys.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.yaml_io import parse_yaml
from .resnet_names import DEPTHS, is_bottleneck

_KEYS = {  # of Detectron2 -> field of InputFormat, and its type
    "MODEL.RESNETS.STRIDE_IN_1X1": ("stride_in_1x1", bool),
    "INPUT.FORMAT": ("format", str),
    "MODEL.PIXEL_MEAN": ("mean", list),
    "MODEL.PIXEL_STD": ("std", list),
    "MODEL.RESNETS.NORM": ("norm", str),
}
# Keys under which weights would load, but compute other features.
CHECKED_KEYS = ("MODEL.RESNETS.STRIDE_IN_1X1", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "INPUT.FORMAT")
_FIELDS = {  # key of the JSON -> field of Provenance, and its type; in the order in which they are written
    "source": ("source", str),
    "source_sha256": ("sha256", str),
    "seed": ("seed", int),
    "arch": ("arch", str),
    "stem": ("stem", str),
    "prefix": ("prefix", str),
    "encoder": ("encoder", str),
    "config": ("config", str),
    "method": ("method", str),
    "epoch": ("epoch", (int, float)),
    "step": ("step", int),
}
# Recorded even if 0 or empty: a network without a prefix, of a method with one encoder, before the first epoch.
_MAY_BE_EMPTY = ("prefix", "encoder", "epoch", "step", "seed")


@dataclass(frozen=True)
class InputFormat:
    """What a network was trained with and its tensors do not show; None where it is not recorded.

    Attributes:
        format: order of the channels: RGB | BGR.
        mean, std: pixel statistics of the channels, in that order, from 0 to 255.
        stride_in_1x1: whether bottlenecks downsample in their first convolution rather than in the 3x3.
        norm: the only norm with which the tensors compute the same features, if not every one does.
    """

    format: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    stride_in_1x1: bool | None = None
    norm: str | None = None

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> InputFormat:
        """Read the values of Detectron2's keys, as in a config or a record."""
        return cls(**{name: keys[key] for key, (name, kind) in _KEYS.items() if isinstance(keys.get(key), kind)})

    @classmethod
    def of_pretraining(cls, config: str | None) -> InputFormat:
        """Return what torchvision's ResNets have, with the statistics in a config of this project."""
        with contextlib.suppress(LookupError, TypeError, ValueError):  # another project's config, or none
            views = parse_yaml(config or "")["VIEWS"]
            mean = [round(255 * value, 6) for value in views["MEAN"]]
            std = [round(255 * value, 6) for value in views["STD"]]
            return cls("RGB", mean, std, stride_in_1x1=False)
        return cls("RGB", stride_in_1x1=False)

    def to_keys(self) -> dict[str, Any]:
        """Return what is recorded under Detectron2's keys."""
        values = {key: getattr(self, name) for key, (name, _) in _KEYS.items()}
        return {key: value for key, value in values.items() if value is not None}

    def compare_statistics(self, mean: Sequence[float], std: Sequence[float]) -> str:
        """Describe how VIEWS.MEAN and VIEWS.STD differ from what is recorded, and the remedy; "" if they do not."""
        if not (self.mean and self.std):
            return ""
        recorded = {"VIEWS.MEAN": _divide_by_255(self.mean), "VIEWS.STD": _divide_by_255(self.std)}
        current = {"VIEWS.MEAN": mean, "VIEWS.STD": std}
        for key, values in recorded.items():
            if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(current[key], values, strict=True)):
                remedy = " ".join(f"{name} '{numbers}'" for name, numbers in recorded.items())
                return f"{key} is {[*current[key]]}, not {values}; set {remedy}"
        return ""


def _divide_by_255(values: Sequence[float]) -> list[float]:
    return [round(value / 255, 6) for value in values]


MSRA = InputFormat("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0], stride_in_1x1=True)


@dataclass(frozen=True)
class Provenance:
    """The origin of a backbone.

    Attributes:
        source: name of the file that it was read from, or ``random``.
        sha256: SHA-256 of that file.
        method, epoch, step, config: the pretraining: objective, completed epochs and steps, config as YAML text.
        arch: resnet18 | resnet34 | resnet50 | resnet101.
        stem: imagenet (7x7) | cifar (3x3).
        prefix, encoder: which network of the pretraining's file it is; query | key of a momentum method.
        seed: of random values.
        input: what it was trained with; None of random values.
        fine_tuned_on: data sets of the detectors that were trained from it, in this order.
        earlier: record of the file ``source``, if a conversion wrote that file or it is a fine-tuned detector.
    """

    source: str = ""
    sha256: str = ""
    method: str = ""
    epoch: float | None = None
    step: int | None = None
    config: str | None = None
    arch: str = ""
    stem: str = ""
    prefix: str | None = None
    encoder: str | None = None
    seed: int | None = None
    input: InputFormat | None = None
    fine_tuned_on: tuple[str, ...] = ()
    earlier: Provenance | None = field(default=None, repr=False)

    @classmethod
    def random(cls, arch: str, stem: str, seed: int) -> Provenance:
        """Record an untrained network."""
        return cls("random", arch=arch, stem=stem, seed=seed)

    @classmethod
    def from_checkpoint(
        cls, source: str, sha256: str, content: Mapping[str, Any], record: Provenance | None, **network: str
    ) -> Provenance:
        """Record a network that is read from a file.

        Args:
            content: content of the file: ``config``, ``method``, ``epoch`` and ``step``, if it is a checkpoint.
            record: what is recorded of the file (`records.read_record`): its pretraining then stays the backbone's.
            network: arch, stem, prefix and encoder (empty if the file does not show one) of the network.
        """
        before = record or cls()
        if before.fine_tuned_on:  # the content is a detector's: its config and counts are not the pretraining's
            content = {}
        config = content.get("config")
        config = config if isinstance(config, str) else before.config
        method = content.get("method")
        with contextlib.suppress(LookupError, TypeError, ValueError):  # another project's config, or none
            method = parse_yaml(content["config"])["METHOD"]["NAME"]
        counts = {name: content[name] for name in ("epoch", "step") if isinstance(content.get(name), int)}
        return cls(
            source,
            sha256,
            method if isinstance(method, str) else before.method,
            counts.get("epoch", before.epoch),
            counts.get("step", before.step),
            config,
            network["arch"],
            network["stem"],
            network["prefix"] if before.prefix is None else before.prefix,
            network["encoder"] or before.encoder or "",
            input=before.input or InputFormat.of_pretraining(config),
            fine_tuned_on=before.fine_tuned_on,
            earlier=record if before.source else None,
        )

    @classmethod
    def from_caffe2(cls, *, folded: bool) -> Provenance:
        """Record a ResNet of MSRA; with ``folded`` statistics, it is the same with FrozenBN only."""
        return cls(method="supervised_msra", input=replace(MSRA, norm="FrozenBN" if folded else None))

    @classmethod
    def from_detector(cls, start: Provenance | None, input: InputFormat, trained_on: tuple[str, ...]) -> Provenance:
        """Record a detector that was trained from ``start``; None if that is not known."""
        start = start or cls()
        names = trained_on or ("data that are not recorded",)
        return replace(start, input=input, fine_tuned_on=(*start.fine_tuned_on, *names))

    @classmethod
    def from_json(cls, data: Any) -> Provenance | None:
        """Read a record of this version or an earlier one, which had no chain; return None if it is no record.

        Fields that a later version adds, and values of another type, count as not recorded.
        """
        if isinstance(data, str):  # in the metadata of safetensors
            with contextlib.suppress(ValueError):
                data = json.loads(data)
        if not isinstance(data, Mapping):
            return None
        values = {
            name: data[key]
            for key, (name, kind) in _FIELDS.items()
            if isinstance(data.get(key), kind) and not isinstance(data[key], bool)
        }
        keys = InputFormat.from_keys(data)
        tuned = data.get("fine_tuned_on")
        tuned = tuple(map(str, tuned)) if isinstance(tuned, (list, tuple)) else ()
        earlier = cls.from_json(data.get("earlier"))
        if earlier is None and isinstance(data.get("earlier_source"), str):
            earlier = cls(data["earlier_source"])
        record = cls(**values, input=keys if keys != InputFormat() else None, fine_tuned_on=tuned, earlier=earlier)
        return record if record != cls() else None

    def to_json(self) -> dict[str, Any]:
        """Return the record as one flat object of plain values, without what is not recorded."""
        stored = {key: getattr(self, name) for key, (name, _) in _FIELDS.items()}
        values = {key: value for key, value in stored.items() if value or (value is not None and key in _MAY_BE_EMPTY)}
        if self.earlier:
            values |= {"earlier_source": self.earlier.source, "earlier": self.earlier.to_json()}
        if self.fine_tuned_on:
            values["fine_tuned_on"] = list(self.fine_tuned_on)
        return {**self.to_keys(), **values}

    def to_keys(self) -> dict[str, Any]:
        """Return what the config of a detector with these weights must have, under Detectron2's keys."""
        recorded = self.input.to_keys() if self.input else {}
        if not self.input or self.arch not in DEPTHS:
            return recorded
        keys = {
            "MODEL.RESNETS.DEPTH": int(self.arch.removeprefix("resnet")),
            "MODEL.RESNETS.STRIDE_IN_1X1": self.input.stride_in_1x1,
            "MODEL.RESNETS.RES2_OUT_CHANNELS": 256 if is_bottleneck(self.arch) else 64,
            **recorded,
        }
        return {key: value for key, value in keys.items() if value is not None}

    def chain(self) -> Iterator[Provenance]:
        """Yield this record and the earlier ones, the newest first."""
        record: Provenance | None = self
        while record:
            yield record
            record = record.earlier


def read_origins(results: Mapping[str, Any]) -> list[Provenance]:
    """Return the records in a results.json of any stage, or in the FILE.json of a conversion."""
    weights = results.get("weights")
    sources = results.get("sources")
    places = [results, results.get("source"), weights.get("provenance") if isinstance(weights, Mapping) else None]
    places += sources.values() if isinstance(sources, Mapping) else []
    return [record for record in map(Provenance.from_json, places) if record and record.sha256]


def is_made_from(results: Mapping[str, Any], sha256: str) -> bool:
    """Return False if ``results`` name the weights they were made from, and the file ``sha256`` is not among them."""
    origins = read_origins(results)
    return not origins or any(record.sha256 == sha256 for origin in origins for record in origin.chain())
