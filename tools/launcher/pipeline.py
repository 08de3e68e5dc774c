"""A pipeline file: pretraining by several methods, probes, conversion, fine-tuning, one report.

OUTPUT_DIR: runs/demo
DATA: [digits, datasets/digits]            # optional: words for tools/make_data.py; the last one is its folder
BRANCHES:                                  # what is compared; each name is a column of the story
  random: {WEIGHTS: random}                # no pretraining
  supervised: {WEIGHTS: weights/r50.pth}   # somebody else's
  jcl: {PRETRAIN: configs/pretrain/jcl_R50_IN1k_200ep.yaml, OVERRIDES: [SEED, 1]}
OVERRIDES: []                              # for every pretraining and probe
KNN: [knn.yaml]                            # config files; '' is the pretraining's own config
LINEAR: [configs/linear/R50_IN1k_100ep.yaml]
TRANSFER: {mask: configs/coco_mask_R50_FPN_1x_jcl.yaml}     # MODEL.WEIGHTS is filled in, a branch each
TRANSFER_OVERRIDES: []
ENGINE: detectron2                         # or torchvision; empty: Detectron2 where it is installed
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.common.errors import UserError, nearest

from . import stages
from .graph import Graph, Node, preview, run
from .spec import StageSpec

__all__ = ["load", "preview", "run"]

_DEFAULTS: dict[str, Any] = {
    "OUTPUT_DIR": "", "DATA": [], "BRANCHES": {}, "OVERRIDES": [], "KNN": [], "LINEAR": [], "TRANSFER": {},
    "TRANSFER_OVERRIDES": [], "ENGINE": "",
}  # fmt: skip
_BRANCH = {"PRETRAIN": "", "WEIGHTS": "", "OVERRIDES": []}


def load(path: str, output: str = "") -> Graph:
    """Reads a pipeline file and resolves every config it names.

    Raises:
        UserError: unknown key, missing file, a value of the wrong kind, a branch without weights.
    """
    plan = read_plan(path, _DEFAULTS)
    if not plan["BRANCHES"]:
        raise UserError(f"{path} has no BRANCHES; name at least one method")
    folder = Path(output or plan["OUTPUT_DIR"] or f"runs/{Path(path).stem}").absolute()
    nodes: list[Node] = []
    first: tuple[str, ...] = ()
    if plan["DATA"]:
        words = split_words(plan["DATA"])
        nodes.append(Node("data", stages.make_data(words, words[-1], str(folder / "data"))))
        first = ("data",)
    branches = {
        single_word(name, f"branch in {path}"): _checked(branch, _BRANCH, f"{path}: branch {name}")
        for name, branch in plan["BRANCHES"].items()
    }
    for name, branch in branches.items():
        nodes += _branch(name, branch, plan, folder, first, _probe_base(branch, branches, plan, name))
    words = (str(folder), "--output", str(folder / "report.md"))
    report = StageSpec(
        "report", str(folder / "report"), "tools.report:main", args=(list(words),), produces=str(folder / "report.md"),
        one_process=True, gpu=False,
    )  # fmt: skip
    return Graph("pipeline", str(folder), tuple(nodes), report, str(Path(path).absolute()))


def read_plan(path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """A YAML mapping with the keys of ``defaults`` and values of their kinds.

    Raises:
        UserError: no such file, not YAML, unknown key (the nearest known one is named), wrong kind.
    """
    if not Path(path).is_file():
        near = nearest(Path(path).name, [p.name for p in Path(path).parent.glob("*.yaml")])
        raise UserError(f"no file {path}{near}")
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return _checked(loaded, defaults, path)


def single_word(name: Any, what: str) -> str:
    """A name that may stand in a path, in a job's name and on a command line.

    Raises:
        UserError: it holds something else than letters, digits and ``._+=-``, or does not begin with one of the first.
    """
    if isinstance(name, bool) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", str(name)):
        raise UserError(f"{what} is named {name!r}; use letters, digits and . _ + = - only, a letter or digit first")
    return str(name)


def _branch(
    name: str,
    branch: dict[str, Any],
    plan: dict[str, Any],
    folder: Path,
    first: tuple[str, ...],
    base: StageSpec | None,
) -> list[Node]:
    """The stages of one branch: [pretraining,] probes, conversion, fine-tuning."""
    nodes: list[Node] = []
    overrides = [*split_words(plan["OVERRIDES"]), *split_words(branch["OVERRIDES"])]
    weights, ready = branch["WEIGHTS"], first
    if branch["PRETRAIN"]:
        output = folder / name / "pretrain"
        spec = stages.pretrain(branch["PRETRAIN"], [*overrides, "OUTPUT_DIR", str(output)])
        nodes.append(Node(f"{name}/pretrain", spec, first))
        weights, ready = spec.folder, (f"{name}/pretrain",)
    for stage, files in (("knn", _files(plan["KNN"])), ("linear", _files(plan["LINEAR"]))):
        for file in files:
            label = stage if len(files) == 1 else f"{stage}_{Path(file).stem or 'own'}"
            probe = stages.probe(
                stage, weights, file, overrides, str(folder / name / label), base.config if base else ""
            )
            nodes.append(Node(f"{name}/{label}", probe, ready))
    if not plan["TRANSFER"]:
        return nodes
    backbone = ""
    if weights != "random":
        backbone = str(folder / name / "backbone.pth")
        spec = stages.convert(weights, backbone, folder=str(folder / name / "convert"))
        nodes.append(Node(f"{name}/convert", spec, ready))
        ready = (f"{name}/convert", *first)
    for detector, file in plan["TRANSFER"].items():
        key = f"{name}/{single_word(detector, 'a detector of TRANSFER')}"
        words = [*split_words(plan["TRANSFER_OVERRIDES"]), "MODEL.WEIGHTS", backbone]
        spec = stages.transfer(str(file), words, str(folder / key), engine=plan["ENGINE"])
        nodes.append(Node(key, spec, ready))
    return nodes


def _probe_base(branch: dict[str, Any], branches: dict[str, Any], plan: dict[str, Any], name: str) -> StageSpec | None:
    """The pretraining whose data and architecture a branch's probes take: its own, else the file's first."""
    if not plan["KNN"] and not plan["LINEAR"]:
        return None
    source = branch if branch["PRETRAIN"] else next((b for b in branches.values() if b["PRETRAIN"]), None)
    if source is None:
        return None
    return stages.pretrain(source["PRETRAIN"], [*split_words(plan["OVERRIDES"]), *split_words(source["OVERRIDES"])])


def _checked(loaded: Any, defaults: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise UserError(f"{where} must hold 'KEY: value' lines; known keys: {', '.join(defaults)}")
    for key, value in loaded.items():
        if key not in defaults:
            raise UserError(f"unknown key {key} in {where}{nearest(str(key), defaults)}")
        if not isinstance(value, type(defaults[key])) and not (
            isinstance(defaults[key], list) and isinstance(value, str)
        ):
            raise UserError(f"{key} in {where} is {value!r}; it must be a {type(defaults[key]).__name__}")
    branch = {**defaults, **loaded}
    if "WEIGHTS" in defaults and bool(branch["PRETRAIN"]) == bool(branch["WEIGHTS"]):
        raise UserError(f"{where} needs PRETRAIN (a recipe) or WEIGHTS (a file, or random), and not both")
    return branch


def split_words(value: str | Sequence[Any]) -> list[str]:
    """Words of a command line: a list, or one string as a shell would split it."""
    try:
        return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
    except ValueError as error:
        raise UserError(f"{value!r} is no list of words: {error}") from error


def _files(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else [str(file) for file in value]
