"""A pipeline file: pretraining by several methods, probes, conversion, fine-tuning, one report.

OUTPUT_DIR: runs/demo
DATA: [digits, datasets/digits]            # optional: kind of tools/make_data.py, its options and the folder, or a list
SEEDS: [1, 2, 3]                           # optional: every branch once per seed, which {seed} anywhere stands for
BASELINE: random                           # optional: the branch that others are compared with
BRANCHES:                                  # what is compared, by name
  random: {WEIGHTS: random}                # no pretraining
  supervised: {WEIGHTS: weights/r50.pth}   # made elsewhere
  coco: {DETECTOR: weights/zoo.pkl}        # fine-tuned further, with the heads that fit
  jcl: {PRETRAIN: configs/pretrain/jcl_R50_IN1k_200ep.yaml, OVERRIDES: [SEED, 1]}  # may have its LINEAR, TRANSFER
OVERRIDES: []                              # for every pretraining and probe
KNN: [knn.yaml]                            # config files; own: the pretraining's own config
LINEAR: [configs/linear/R50_IN1k_100ep.yaml]
DISTRIBUTIONS: [own]                       # JCL's Fig. 3, a run per branch
TRANSFER:                                  # detectors by name; MODEL.WEIGHTS is set per branch
  mask: configs/coco_mask_R50_FPN_1x_jcl.yaml
  short: {CONFIG: configs/coco_mask_R50_FPN_1x_jcl.yaml, OVERRIDES: [SOLVER.MAX_ITER, 9000], ENGINE: torchvision}
TRANSFER_OVERRIDES: []
ENGINE: detectron2                         # or torchvision; empty: Detectron2 where it is installed

Instead of BRANCHES, settings of one recipe, a branch each, once per seed (0 without SEEDS):

PRETRAIN: configs/pretrain/jcl_R18_IN100_100ep.yaml
GRID: {METHOD.NUM_KEYS: [1, 2, 4, 6, 8]}   # every combination of values
POINTS:                                    # or settings whose values belong together
- {SOLVER.IMS_PER_BATCH: 128, SOLVER.BASE_LR: 0.1}
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.config.yaml_io import parse_yaml
from pretrain.common.errors import UserError, nearest, one_line
from pretrain.common.files import existing_file

from . import stages
from .graph import Graph, Node
from .spec import StageSpec

_DEFAULTS: dict[str, Any] = {
    "OUTPUT_DIR": "", "DATA": [], "SEEDS": [], "BASELINE": "", "BRANCHES": {}, "OVERRIDES": [], "KNN": [], "LINEAR": [],
    "DISTRIBUTIONS": [], "TRANSFER": {}, "TRANSFER_OVERRIDES": [], "ENGINE": "", "PRETRAIN": "", "GRID": {},
    "POINTS": [],
}  # fmt: skip
_BRANCH = {"PRETRAIN": "", "WEIGHTS": "", "DETECTOR": "", "OVERRIDES": [], "LINEAR": [], "TRANSFER": {}}
_DETECTOR = {"CONFIG": "", "OVERRIDES": [], "ENGINE": ""}


def load(path: str, output: str = "", engine: str = "") -> Graph:
    """Reads a pipeline file and resolves every config it names.

    Args:
        output: instead of the file's OUTPUT_DIR.
        engine: instead of the file's ENGINE.
    """
    plan = read_plan(path)
    plan["ENGINE"] = engine or plan["ENGINE"]
    is_sweep = bool(plan["PRETRAIN"] or plan["GRID"] or plan["POINTS"])
    folder = Path(output or plan["OUTPUT_DIR"] or f"runs/{'sweeps/' * is_sweep}{Path(path).stem}").absolute()
    if is_sweep:
        _vary(plan, path)
    kind = "sweep" if is_sweep else "pipeline"
    return Graph(kind, str(folder), _nodes(plan, folder, path), stages.report(folder), _study(plan, path))


def _study(plan: dict[str, Any], path: str) -> dict[str, Any]:
    """What the report of a pipeline over seeds needs; {} without SEEDS."""
    seeds, baseline = _seeds(plan["SEEDS"], path), plan["BASELINE"]
    if baseline and (baseline not in plan["BRANCHES"] or not seeds):
        raise UserError(f"BASELINE in {path} is {baseline}; it must be one of BRANCHES, each with several SEEDS")
    branches = {name: {seed: _branch_name(name, seed) for seed in seeds} for name in plan["BRANCHES"]}
    return {"branches": branches, "baseline": baseline} if seeds else {}


def _vary(plan: dict[str, Any], path: str) -> None:
    """Gives ``plan`` a branch per setting."""
    if not plan["PRETRAIN"] or plan["BRANCHES"]:
        raise UserError(f"{path} needs PRETRAIN, the recipe that its settings vary, and no BRANCHES")
    plan["SEEDS"], plan["BRANCHES"] = plan["SEEDS"] or [0], {}
    for setting in _settings(plan["GRID"], plan["POINTS"], path):
        pairs = [(key.split(".")[-1].lower(), re.sub(r"[^A-Za-z0-9.+-]", "_", str(setting[key]))) for key in setting]
        name = "_".join(f"{key}={value}" for key, value in pairs)
        if name in plan["BRANCHES"]:
            raise UserError(f"two settings in {path} would share the name {name}; remove one of them")
        overrides = [str(word) for pair in setting.items() for word in pair]
        plan["BRANCHES"][name] = {"PRETRAIN": plan["PRETRAIN"], "OVERRIDES": overrides}


def _settings(grid: dict[str, Any], points: list[Any], path: str) -> list[dict[str, Any]]:
    """Every combination of ``grid``, or ``points``, of which exactly one is given: config key -> value."""
    if bool(grid) == bool(points):
        raise UserError(f"{path} needs GRID (every combination of values) or POINTS (a list of settings), and not both")
    for point in points:
        if not isinstance(point, dict) or not point or not all(isinstance(key, str) for key in point):
            raise UserError(f"POINTS in {path} is {points!r}; write a list of settings, each KEY: value")
    for key, values in grid.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise UserError(f"GRID {key} in {path} is {values!r}; write a list of values")
    return points or [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _nodes(plan: dict[str, Any], folder: Path, path: str) -> tuple[Node, ...]:
    """The stages of a ``plan`` with the keys of `_DEFAULTS`, each below ``folder``; ``path`` is for messages."""
    if not plan["BRANCHES"]:
        raise UserError(f"{path} has no BRANCHES; name at least one method")
    plans = {seed: _for_seed(plan, seed) for seed in _seeds(plan["SEEDS"], path) or [""]}
    nodes = [Node(key, stages.make_data(words, str(folder / key))) for key, words in _data_sets(plans.values()).items()]
    first = tuple(node.key for node in nodes)
    branches: list[tuple[str, str, dict[str, Any]]] = []  # name, seed, content
    trained: dict[str, StageSpec] = {}
    for label, (seed, of_seed) in itertools.product(plan["BRANCHES"], plans.items()):
        where = f"{path}: branch {single_word(label, f'branch in {path}')}"
        branch = _checked(of_seed["BRANCHES"][label], _BRANCH, where)
        branch["SEED"] = ["SEED", seed] if seed else []
        branch["OVERRIDES"] = [*split_words(of_seed["OVERRIDES"]), *split_words(branch["OVERRIDES"]), *branch["SEED"]]
        branches.append((_branch_name(label, seed), seed, branch))
        if branch["PRETRAIN"]:
            words = [*branch["OVERRIDES"], "OUTPUT_DIR", str(folder / branches[-1][0] / "pretrain")]
            trained[branches[-1][0]] = stages.pretrain(branch["PRETRAIN"], words)
    for name, seed, branch in branches:
        # A branch without a pretraining is probed by data and architecture of the first one of its seed.
        base = trained.get(name) or next((trained[n] for n, of, _ in branches if of == seed and n in trained), None)
        of_branch = {**plans[seed], **{key: branch[key] for key in ("LINEAR", "TRANSFER") if branch[key]}}
        weights, ready = branch["WEIGHTS"] or branch["DETECTOR"], first
        if name in trained:
            nodes.append(Node(f"{name}/pretrain", trained[name], first))
            weights, ready = trained[name].folder, (nodes[-1].key,)
        nodes += _probes(name, weights, branch["OVERRIDES"], of_branch, folder, ready, base.config if base else "")
        nodes += _detectors(name, weights, branch, of_branch, folder, ready, first, path)
    return tuple(nodes)


def _branch_name(name: Any, seed: str) -> str:
    return f"{name}_seed={seed}" if seed else str(name)


def _seeds(given: Any, path: str) -> list[str]:
    seeds = split_words(given)
    if not all(seed.isdecimal() and seeds.count(seed) == 1 for seed in seeds):
        raise UserError(f"SEEDS in {path} are {', '.join(seeds)}; write whole numbers, each once")
    return seeds


def _for_seed(value: Any, seed: str) -> Any:
    """A value of a pipeline file with ``seed`` instead of each ``{seed}`` in its texts."""
    if isinstance(value, dict):
        return {key: _for_seed(content, seed) for key, content in value.items()}
    if isinstance(value, list):
        return [_for_seed(content, seed) for content in value]
    return value.replace("{seed}", seed) if isinstance(value, str) else value


def _data_sets(plans: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Words for make_data.py by the stage's key: one set, or several, each a list, named after their folders."""
    sets: list[list[str]] = []
    is_list = False
    for given in (plan["DATA"] for plan in plans if plan["DATA"]):
        is_list = isinstance(given[0], list)
        sets += [words for words in map(split_words, given if is_list else [given]) if words and words not in sets]
    return {f"data/{Path(words[-1]).name}" if is_list or len(sets) > 1 else "data": words for words in sets}


def read_plan(path: str) -> dict[str, Any]:
    """The keys of `_DEFAULTS` as a file gives them."""
    file = existing_file(path, "file", "*.yaml")
    try:
        plan = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    return _checked(plan, _DEFAULTS, path)


def single_word(name: Any, what: str) -> str:
    """A name that is safe in a path, in a job's name and on a command line."""
    if isinstance(name, bool) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", str(name)):
        raise UserError(f"{what} is named {name!r}; use letters, digits and . _ + = - only, a letter or digit first")
    return str(name)


def _probes(
    name: str, weights: str, overrides: list[str], plan: dict[str, Any], folder: Path, ready: tuple[str, ...], base: str
) -> list[Node]:
    nodes = []
    for stage in ("knn", "linear", "distributions"):
        files = [plan[stage.upper()]] if isinstance(plan[stage.upper()], str) else plan[stage.upper()]
        for file in ("" if file == "own" else str(file) for file in files):
            key = f"{name}/{stage}" if len(files) == 1 else f"{name}/{stage}_{Path(file).stem or 'own'}"
            words = [*overrides, "OUTPUT_DIR", str(folder / key)]
            if stage == "distributions":
                spec = stages.distributions([weights], words, str(folder / key), file, base)
            else:
                spec = stages.probe(stage, weights, file, words, base)
            nodes.append(Node(key, spec, ready))
    return nodes


def _detectors(
    name: str, weights: str, branch: dict[str, Any], plan: dict[str, Any], folder: Path, ready: tuple[str, ...],
    first: tuple[str, ...], path: str,
) -> list[Node]:  # fmt: skip
    """Conversion and fine-tuning; random weights and detectors are not converted."""
    nodes: list[Node] = []
    start = branch["DETECTOR"] or ("" if weights == "random" else str(folder / name / "backbone.pth"))
    if plan["TRANSFER"] and start and not branch["DETECTOR"]:
        spec = stages.convert(weights, start, folder=str(folder / name / "convert"))
        nodes.append(Node(f"{name}/convert", spec, ready))
        ready = (f"{name}/convert", *first)
    for detector, keys in plan["TRANSFER"].items():
        key = f"{name}/{single_word(detector, 'a detector of TRANSFER')}"
        keys = keys if isinstance(keys, dict) else {"CONFIG": str(keys)}
        keys = _checked(keys, _DETECTOR, f"{path}: detector {detector}")
        words = [*split_words(plan["TRANSFER_OVERRIDES"]), *split_words(keys["OVERRIDES"]), *branch["SEED"]]
        words += ["MODEL.WEIGHTS", start, "OUTPUT_DIR", str(folder / key)]
        spec = stages.transfer(keys["CONFIG"], words, engine=keys["ENGINE"] or plan["ENGINE"])
        nodes.append(Node(key, spec, ready))
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
    if "WEIGHTS" in defaults and sum(bool(branch[key]) for key in ("PRETRAIN", "WEIGHTS", "DETECTOR")) != 1:
        raise UserError(f"{where} needs one of PRETRAIN (a recipe), WEIGHTS (a file, or random) and DETECTOR (a file)")
    return branch


def split_words(value: str | Sequence[Any]) -> list[str]:
    """Words of a command line: a list, or one string, split as a shell would."""
    try:
        return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
    except ValueError as error:
        raise UserError(f"{value!r} is not a list of words: {error}") from error
