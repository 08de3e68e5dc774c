"""A pipeline file: pretraining by several methods, probes, conversion, fine-tuning, one report.

OUTPUT_DIR: runs/demo
DATA: [digits, datasets/digits]            # optional: words for tools/make_data.py; the last one is its folder
BRANCHES:                                  # what is compared, by name
  random: {WEIGHTS: random}                # no pretraining
  supervised: {WEIGHTS: weights/r50.pth}   # made elsewhere
  jcl: {PRETRAIN: configs/pretrain/jcl_R50_IN1k_200ep.yaml, OVERRIDES: [SEED, 1]}
OVERRIDES: []                              # for every pretraining and probe
KNN: [knn.yaml]                            # config files; own: the pretraining's own config
LINEAR: [configs/linear/R50_IN1k_100ep.yaml]
TRANSFER: {mask: configs/coco_mask_R50_FPN_1x_jcl.yaml}     # MODEL.WEIGHTS is set per branch
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
from pretrain.common.files import existing_file

from . import stages
from .graph import Graph, Node
from .spec import StageSpec

DEFAULTS: dict[str, Any] = {
    "OUTPUT_DIR": "", "DATA": [], "BRANCHES": {}, "OVERRIDES": [], "KNN": [], "LINEAR": [], "TRANSFER": {},
    "TRANSFER_OVERRIDES": [], "ENGINE": "",
}  # fmt: skip
_BRANCH = {"PRETRAIN": "", "WEIGHTS": "", "OVERRIDES": []}


def load(path: str, output: str = "", engine: str = "") -> Graph:
    """Reads a pipeline file and resolves every config it names.

    Args:
        output: instead of the file's OUTPUT_DIR.
        engine: instead of the file's ENGINE; kept for `resume`.

    Raises:
        UserError: unknown key, missing file, a value of the wrong kind, a branch without weights.
    """
    plan = read_plan(path, DEFAULTS)
    if engine and not plan["TRANSFER"]:
        raise UserError(f"--engine {engine} would have no effect, because {path} has no TRANSFER; leave it out")
    plan["ENGINE"] = engine or plan["ENGINE"]
    folder = Path(output or plan["OUTPUT_DIR"] or f"runs/{Path(path).stem}").absolute()
    words = [str(folder), "--output", str(folder / "report.md")]
    report = stages.report(folder, "tools.report:main", [words], "report.md")
    nodes, facts = nodes_of(plan, folder, path), {"engine": engine}
    return Graph("pipeline", str(folder), nodes, report, str(Path(path).absolute()), facts)


def nodes_of(plan: dict[str, Any], folder: Path, path: str) -> tuple[Node, ...]:
    """The stages of a ``plan`` with the keys of `DEFAULTS`, each below ``folder``; ``path`` is for messages."""
    if not plan["BRANCHES"]:
        raise UserError(f"{path} has no BRANCHES; name at least one method")
    nodes: list[Node] = []
    if plan["DATA"]:
        nodes.append(Node("data", stages.make_data(split_words(plan["DATA"]), str(folder / "data"))))
    first = tuple(node.key for node in nodes)
    branches: dict[str, dict[str, Any]] = {}
    trained: dict[str, StageSpec] = {}
    for name, given in plan["BRANCHES"].items():
        name = single_word(name, f"branch in {path}")
        branch = branches[name] = _checked(given, _BRANCH, f"{path}: branch {name}")
        branch["OVERRIDES"] = [*split_words(plan["OVERRIDES"]), *split_words(branch["OVERRIDES"])]
        if branch["PRETRAIN"]:
            words = [*branch["OVERRIDES"], "OUTPUT_DIR", str(folder / name / "pretrain")]
            trained[name] = stages.pretrain(branch["PRETRAIN"], words)
    for name, branch in branches.items():
        # A branch without a pretraining is probed by data and architecture of the file's first one.
        base = trained.get(name) or next(iter(trained.values()), None)
        weights, ready = branch["WEIGHTS"], first
        if name in trained:
            nodes.append(Node(f"{name}/pretrain", trained[name], first))
            weights, ready = trained[name].folder, (nodes[-1].key,)
        nodes += _probes(name, weights, branch["OVERRIDES"], plan, folder, ready, base.config if base else "")
        nodes += _detectors(name, weights, plan, folder, ready, first)
    return tuple(nodes)


def read_plan(path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """A YAML mapping with the keys of ``defaults`` and values of their kinds.

    Raises:
        UserError: no such file, not YAML, unknown key (the nearest known one is named), wrong kind.
    """
    file = existing_file(path, "file", "*.yaml")
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return _checked(loaded, defaults, path)


def single_word(name: Any, what: str) -> str:
    """A name that is safe in a path, in a job's name and on a command line.

    Raises:
        UserError: it holds something else than letters, digits and ``._+=-``, or does not begin with one of the first.
    """
    if isinstance(name, bool) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", str(name)):
        raise UserError(f"{what} is named {name!r}; use letters, digits and . _ + = - only, a letter or digit first")
    return str(name)


def _probes(
    name: str, weights: str, overrides: list[str], plan: dict[str, Any], folder: Path, ready: tuple[str, ...], base: str
) -> list[Node]:
    nodes = []
    for stage in ("knn", "linear"):
        files = [plan[stage.upper()]] if isinstance(plan[stage.upper()], str) else plan[stage.upper()]
        for file in ("" if file == "own" else str(file) for file in files):
            key = f"{name}/{stage}" if len(files) == 1 else f"{name}/{stage}_{Path(file).stem or 'own'}"
            words = [*overrides, "OUTPUT_DIR", str(folder / key)]
            nodes.append(Node(key, stages.probe(stage, weights, file, words, base), ready))
    return nodes


def _detectors(
    name: str, weights: str, plan: dict[str, Any], folder: Path, ready: tuple[str, ...], first: tuple[str, ...]
) -> list[Node]:
    """Conversion and fine-tuning; random weights are not converted."""
    nodes: list[Node] = []
    backbone = "" if weights == "random" else str(folder / name / "backbone.pth")
    if plan["TRANSFER"] and backbone:
        spec = stages.convert(weights, backbone, folder=str(folder / name / "convert"))
        nodes.append(Node(f"{name}/convert", spec, ready))
        ready = (f"{name}/convert", *first)
    for detector, file in plan["TRANSFER"].items():
        key = f"{name}/{single_word(detector, 'a detector of TRANSFER')}"
        words = [*split_words(plan["TRANSFER_OVERRIDES"]), "MODEL.WEIGHTS", backbone, "OUTPUT_DIR", str(folder / key)]
        nodes.append(Node(key, stages.transfer(str(file), words, engine=plan["ENGINE"]), ready))
    return nodes


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
        raise UserError(f"{value!r} is not a list of words: {error}") from error
