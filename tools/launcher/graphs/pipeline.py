"""The pipeline file: pretraining by several methods, probes, conversion, fine-tuning, and one report.

OUTPUT_DIR: runs/demo
DATA: [digits, datasets/digits]            # optional: kind of tools/make_data.py, its options and the folder, or a list
SEEDS: [1, 2, 3]                           # optional: every branch runs once per seed; {seed} stands for it
BASELINE: random                           # optional: the branch that others are compared with
BRANCHES:                                  # what is compared, by name
  random: {WEIGHTS: random}                # without pretraining
  supervised: {WEIGHTS: weights/r50.pth}   # trained elsewhere
  coco: {DETECTOR: weights/zoo.pkl}        # a detector to fine-tune further, with the heads that fit
  jcl: {PRETRAIN: configs/pretrain/jcl_R50_IN1k_200ep.yaml, OVERRIDES: [SEED, 1]}  # also its own LINEAR, ...
OVERRIDES: []                              # for every pretraining run and probe
KNN: [knn.yaml]                            # config files; own means the pretraining run's config
LINEAR: [configs/linear/R50_IN1k_100ep.yaml]
EMBEDDING: [own]                           # maps of validation features, which the report shows side by side
TRANSFER:                                  # detectors by name; MODEL.WEIGHTS is set per branch
  mask: configs/coco_mask_R50_FPN_1x_jcl.yaml
  short: {CONFIG: configs/coco_mask_R50_FPN_1x_jcl.yaml, OVERRIDES: [SOLVER.MAX_ITER, 9000], ENGINE: torchvision}
TRANSFER_OVERRIDES: []
ENGINE: detectron2                         # or torchvision (default: Detectron2 if it is installed)

A sweep has settings of one recipe instead of BRANCHES: one branch per setting and seed (default: seed 0).

PRETRAIN: configs/pretrain/jcl_R18_IN100_100ep.yaml
GRID: {METHOD.NUM_KEYS: [1, 2, 4, 6, 8]}   # every combination of values
POINTS:                                    # or settings whose values belong together
- {SOLVER.IMS_PER_BATCH: 128, SOLVER.BASE_LR: 0.1}
"""

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.config.yaml_io import parse_yaml
from pretrain.common.errors import UserError, one_line, suggest_name
from pretrain.common.files import check_file, check_output_path, expand
from tools.stages import MOVED, SUMMARIES
from tools.stages.base import Stage
from tools.stages.convert import Convert
from tools.stages.data import Data
from tools.stages.pretrain import Pretrain
from tools.stages.probe import Probe
from tools.stages.registry import find_kind
from tools.stages.report import Report
from tools.stages.transfer import Transfer

from .graph import Graph, Node, build_graph

_TYPE_NAMES = {str: "text", list: "a list", dict: "KEY: value lines"}
# The type of each key, whose default is empty. A probe has the key of its name, in capitals.
_FILE: dict[str, type] = {
    **dict.fromkeys(("OUTPUT_DIR", "BASELINE", "ENGINE", "PRETRAIN"), str),
    **dict.fromkeys(("DATA", "SEEDS", "OVERRIDES"), list),
    **dict.fromkeys(("TRANSFER_OVERRIDES", "POINTS"), list),
    **dict.fromkeys(("BRANCHES", "TRANSFER", "GRID"), dict),
}
_BRANCH = {"PRETRAIN": str, "WEIGHTS": str, "DETECTOR": str, "OVERRIDES": list, "LINEAR": list, "TRANSFER": dict}
_DETECTOR = {"CONFIG": str, "OVERRIDES": list, "ENGINE": str}


def load_pipeline(path: str, output: str = "", engine: str = "") -> Graph:
    """Read a pipeline file and resolve every config it names.

    Args:
        output: replaces the file's OUTPUT_DIR.
        engine: replaces the file's ENGINE.
    """
    check_output_path(output, "--output")
    plan = read_pipeline_file(path)
    plan["ENGINE"] = engine or plan["ENGINE"]
    is_sweep = bool(plan["PRETRAIN"] or plan["GRID"] or plan["POINTS"])
    default = f"runs/sweeps/{Path(path).stem}" if is_sweep else f"runs/{Path(path).stem}"
    folder = Path(output or plan["OUTPUT_DIR"] or default).absolute()
    if is_sweep:
        _add_settings(plan, path)
    plan["SEEDS"] = _read_seeds(plan["SEEDS"], path)
    nodes = _build_nodes(plan, folder, path)
    return build_graph(str(folder), nodes, Report.load(Report.Options((str(folder),))), _build_study(plan, path))


def _build_study(plan: dict[str, Any], path: str) -> dict[str, Any]:
    """Build the record that the report of a study over seeds reads, or {} without SEEDS."""
    seeds = plan["SEEDS"]
    baseline = plan["BASELINE"]
    if baseline and (baseline not in plan["BRANCHES"] or not seeds):
        raise UserError(f"BASELINE in {path} is {baseline}; it must be one of the BRANCHES, and it needs SEEDS")
    branches = {name: {seed: _name_branch(name, seed) for seed in seeds} for name in plan["BRANCHES"]}
    return {"branches": branches, "baseline": baseline} if seeds else {}


def _add_settings(plan: dict[str, Any], path: str) -> None:
    """Add one branch per setting to ``plan``."""
    if not plan["PRETRAIN"] or plan["BRANCHES"]:
        raise UserError(f"{path} needs PRETRAIN, the recipe that its settings vary, and no BRANCHES")
    plan["SEEDS"] = plan["SEEDS"] or [0]
    for setting in _list_settings(plan["GRID"], plan["POINTS"], path):
        pairs = [(key.split(".")[-1].lower(), re.sub(r"[^A-Za-z0-9.+-]", "_", str(setting[key]))) for key in setting]
        name = "_".join(f"{key}={value}" for key, value in pairs)
        if name in plan["BRANCHES"]:
            raise UserError(f"two settings in {path} would share the name {name}; remove one of them")
        overrides = [str(word) for pair in setting.items() for word in pair]
        plan["BRANCHES"][name] = {"PRETRAIN": plan["PRETRAIN"], "OVERRIDES": overrides}


def _list_settings(grid: dict[str, Any], points: list[Any], path: str) -> list[dict[str, Any]]:
    """List every combination of ``grid``, or ``points``, each as a map from config key to value."""
    if bool(grid) == bool(points):
        raise UserError(f"{path} needs GRID (every combination of values) or POINTS (a list of settings), and not both")
    for point in points:
        if not isinstance(point, dict) or not point or not all(isinstance(key, str) for key in point):
            raise UserError(f"POINTS in {path} is {points!r}; write a list of settings, each KEY: value")
    for key, values in grid.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise UserError(f"GRID {key} in {path} is {values!r}; write a list of values")
    return points or [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _build_nodes(plan: dict[str, Any], folder: Path, path: str) -> list[Node]:
    """Build the stages of a ``plan`` with the keys of `_FILE`, each below ``folder``; ``path`` is for messages."""
    if not plan["BRANCHES"]:
        raise UserError(f"{path} has no BRANCHES; name at least one method")
    plans = {seed: _insert_seed(plan, seed) for seed in plan["SEEDS"] or [""]}
    data_sets = _list_data_sets(plans.values())
    nodes = [
        Node(key, Data.load(Data.Options(tuple(words)), folder=str(folder / key))) for key, words in data_sets.items()
    ]
    branches: list[_Branch] = []
    for name, (seed, seed_plan) in itertools.product(plan["BRANCHES"], plans.items()):
        branches.append(_read_branch(name, seed, seed_plan, folder, path))
    for branch in branches:
        # A branch without a pretraining run is probed with the data and architecture of the first one of its seed.
        bases = [branch, *(other for other in branches if other.seed == branch.seed)]
        base = next((other.pretrain.config for other in bases if other.pretrain), "")
        nodes += _build_branch(branch, base, tuple(data_sets))
    return nodes


@dataclass(frozen=True)
class _Branch:
    """A branch of one seed.

    Attributes:
        name: the name with the seed.
        keys: the keys of the file for this seed, and over them those of the branch.
        folder: the folder of the branch.
    """

    name: str
    seed: str
    keys: dict[str, Any]
    folder: Path
    pretrain: Stage | None


def _read_branch(label: Any, seed: str, plan: dict[str, Any], folder: Path, path: str) -> _Branch:
    place = f"{path}: branch {check_label(label, f'branch in {path}')}"
    keys = _check_keys(plan["BRANCHES"][label], _BRANCH, place)
    if sum(bool(keys[key]) for key in ("PRETRAIN", "WEIGHTS", "DETECTOR")) != 1:
        raise UserError(f"{place} needs one of PRETRAIN (a recipe), WEIGHTS (a file, or random) and DETECTOR (a file)")
    keys["SEED"] = ["SEED", seed] if seed else []
    keys["OVERRIDES"] = [*split_words(plan["OVERRIDES"]), *split_words(keys["OVERRIDES"]), *keys["SEED"]]
    for key in ("LINEAR", "TRANSFER"):
        keys[key] = keys[key] or plan[key]
    name = _name_branch(label, seed)
    folder = folder / name
    words = [*keys["OVERRIDES"], "OUTPUT_DIR", str(folder / "pretrain")]
    recipe = keys["PRETRAIN"]
    pretrain = Pretrain.load(Pretrain.Options(config_file=recipe), words) if recipe else None
    return _Branch(name, seed, {**plan, **keys}, folder, pretrain)


def _build_branch(branch: _Branch, base: str, data: tuple[str, ...]) -> list[Node]:
    """Build the stages of a branch; ``base`` is the config of its probes, ``data`` the keys of the stages of DATA."""
    nodes = []
    parents = data
    weights = branch.keys["WEIGHTS"] or branch.keys["DETECTOR"]
    if branch.pretrain:
        nodes = [Node(f"{branch.name}/pretrain", branch.pretrain, data)]
        parents = (nodes[0].key,)
        weights = branch.pretrain.folder
    nodes += _build_probes(branch, weights, base, parents)
    return [*nodes, *_build_detectors(branch, weights, parents, data)]


def _name_branch(name: Any, seed: str) -> str:
    return f"{name}_seed={seed}" if seed else str(name)


def _read_seeds(value: Any, path: str) -> list[str]:
    seeds = split_words(value)
    if not all(seed.isdecimal() and seeds.count(seed) == 1 for seed in seeds):
        raise UserError(f"SEEDS in {path} are {', '.join(seeds)}; write distinct integers")
    return seeds


def _insert_seed(value: Any, seed: str) -> Any:
    """Replace each ``{seed}`` in the texts of a value of a pipeline file."""
    if isinstance(value, dict):
        return {key: _insert_seed(content, seed) for key, content in value.items()}
    if isinstance(value, list):
        return [_insert_seed(content, seed) for content in value]
    return value.replace("{seed}", seed) if isinstance(value, str) else value


def _list_data_sets(plans: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Map keys of stages to arguments of make_data.py; several data sets are named after their folders."""
    sets: list[list[str]] = []
    is_list = False
    for data in (plan["DATA"] for plan in plans if plan["DATA"]):
        is_list = isinstance(data[0], list)
        for words in filter(None, map(split_words, data if is_list else [data])):
            words = [expand(word) if word[:1] in "~$" else word for word in words]  # others may be patterns
            sets += [words] if words not in sets else []
    return {f"data/{Path(words[-1]).name}" if is_list or len(sets) > 1 else "data": words for words in sets}


def read_pipeline_file(path: str) -> dict[str, Any]:
    """Read the keys of `_FILE` from a file."""
    file = check_file(path, "file", "*.yaml")
    try:
        plan = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    return _check_keys(plan, _FILE | {probe.name.upper(): list for probe in list_probes()}, path)


def list_probes() -> list[type[Probe]]:
    """List the probes in the order in which they run."""
    return [kind for kind in map(find_kind, SUMMARIES) if issubclass(kind, Probe)]


def check_label(name: Any, description: str) -> str:
    """Return a name that is safe in a path, in a job's name and on a command line; refuse any other."""
    if isinstance(name, bool) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", str(name)):
        rule = "names may contain letters, digits and . _ + = -, and must start with a letter or digit"
        raise UserError(f"{description} is named {name!r}; {rule}")
    return str(name)


def _build_probes(branch: _Branch, weights: str, base: str, parents: tuple[str, ...]) -> list[Node]:
    nodes = []
    for probe in list_probes():
        value = branch.keys[probe.name.upper()]
        files = [value] if isinstance(value, str) else value
        for file in ("" if file == "own" else expand(str(file)) for file in files):
            name = probe.name if len(files) == 1 else f"{probe.name}_{Path(file).stem or 'own'}"
            folder = str(branch.folder / name)
            words = [*branch.keys["OVERRIDES"], "OUTPUT_DIR", folder]
            stage = probe.load(probe.Options(weights, file), words, base)
            nodes.append(Node(f"{branch.name}/{name}", stage, parents))
    return nodes


def _build_detectors(branch: _Branch, weights: str, parents: tuple[str, ...], data: tuple[str, ...]) -> list[Node]:
    """Build conversion and fine-tuning; random weights and detectors are not converted."""
    nodes: list[Node] = []
    initialization = branch.keys["DETECTOR"]
    if branch.keys["TRANSFER"] and not initialization and weights != "random":
        initialization = str(branch.folder / "backbone.pth")
        options = Convert.Options(weights, initialization)
        stage = Convert.load(options, folder=str(branch.folder / "convert"))
        nodes.append(Node(f"{branch.name}/convert", stage, parents))
        parents = (nodes[0].key, *data)
    for name, value in branch.keys["TRANSFER"].items():
        folder = str(branch.folder / check_label(name, "a detector of TRANSFER"))
        keys = value if isinstance(value, dict) else {"CONFIG": str(value)}
        keys = _check_keys(keys, _DETECTOR, f"branch {branch.name}: detector {name}")
        words = [*split_words(branch.keys["TRANSFER_OVERRIDES"]), *split_words(keys["OVERRIDES"])]
        words += [*branch.keys["SEED"], "MODEL.WEIGHTS", initialization, "OUTPUT_DIR", folder]
        stage = Transfer.load(Transfer.Options(keys["CONFIG"], keys["ENGINE"] or branch.keys["ENGINE"]), words)
        nodes.append(Node(f"{branch.name}/{name}", stage, parents))
    return nodes


def _check_keys(loaded: Any, types: dict[str, type], place: str) -> dict[str, Any]:
    """Check that ``loaded`` has known keys with values of the right types, and add the missing ones."""
    if not isinstance(loaded, dict):
        raise UserError(f"{place} must contain 'KEY: value' lines; known keys: {', '.join(types)}")
    for key, value in loaded.items():
        if key not in types:
            script = MOVED.get(str(key).lower())
            hint = f"; remove it, and run {script}" if script else suggest_name(str(key), types)
            raise UserError(f"unknown key {key} in {place}{hint}")
        if not isinstance(value, (list, str) if types[key] is list else types[key]):
            raise UserError(f"{key} in {place} is {value!r}; it must be {_TYPE_NAMES[types[key]]}")
    values = {key: loaded.get(key, kind()) for key, kind in types.items()}
    return {key: expand(value) if types[key] is str else value for key, value in values.items()}  # texts are paths


def split_words(value: str | Sequence[Any]) -> list[str]:
    """Return the words of a list, or of one string, split as a shell would."""
    try:
        return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
    except ValueError as error:
        raise UserError(f"{value!r} is not a list of words: {error}; close its quotes") from error
