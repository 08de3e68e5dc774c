"""Specs of all stages, built from a command line or a pipeline file, with its config resolved and checked."""

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain import config as pretraining
from pretrain.common.config.yaml_io import dump
from pretrain.common.errors import UserError, suggest_name
from pretrain.common.run.state import Job, find_working_folder, read_state
from tools import ROOT, convert_to_d2
from transfer import api, preflight
from transfer import config as fine_tuning
from transfer.weights.convert import convert

from .arguments import TransferArguments
from .spec import ENTRIES, StageSpec

# The default recipe of a method: its paper's on ImageNet-1K where there is one.
_RECIPES = ROOT / "configs" / "pretrain"
_RECIPE_SUFFIX = "_R50_IN1k_200ep.yaml"
_OTHER_RECIPES = {
    "multikey": "jcl_R50_IN1k_200ep.yaml",
    "ressl": "sce_R18_cifar10_200ep.yaml",
    "supcon": "tcl_supervised_R50_cifar10_100ep.yaml",
    "tcl": "tcl_R18_IN100_400ep.yaml",
}
# Overrides that turn another method's recipe into this method's.
_RECIPE_OVERRIDES = {
    "multikey": "METHOD.NAME multikey METHOD.JCL_LAMBDA 1.0 OUTPUT_DIR runs/multikey_R50_IN1k_200ep",
    "ressl": "METHOD.NAME ressl METHOD.TEMPERATURE 0.1 METHOD.KEY_TEMPERATURE 0.04 "
    "OUTPUT_DIR runs/ressl_R18_cifar10_200ep",
    "supcon": "METHOD.NAME supcon METHOD.K1 1.0 OUTPUT_DIR runs/supcon_R50_cifar10_100ep",
}


def find_recipe(method: str) -> Path:
    """Return the default recipe of a method."""
    path = _RECIPES / _OTHER_RECIPES.get(method, f"{method}{_RECIPE_SUFFIX}")
    if not path.is_file():
        available = list_methods()
        remedy = f"choose one of {', '.join(available)}, or pass --config-file FILE{suggest_name(method, available)}"
        raise UserError(f"no default recipe for --method {method}; {remedy}")
    return path


def find_recipe_overrides(method: str) -> list[str]:
    """Return the overrides of a method whose default recipe is another method's, else none."""
    return _RECIPE_OVERRIDES.get(method, "").split()


def list_methods() -> list[str]:
    """List the methods that have a default recipe."""
    return sorted([*_OTHER_RECIPES, *(path.name.split("_")[0] for path in _RECIPES.glob(f"*{_RECIPE_SUFFIX}"))])


def build_pretrain(config_file: str | Path, overrides: Sequence[str] = ()) -> StageSpec:
    """Build the pretraining stage of a recipe, in OUTPUT_DIR or runs/<recipe>."""
    cfg = _load(config_file, overrides)
    return _build("pretrain", cfg, f"runs/{Path(config_file).stem}", (), inputs=_list_weights(cfg))


def build_probe(
    stage: str, weights: str, config_file: str = "", overrides: Sequence[str] = (), base: str = ""
) -> StageSpec:
    """Build the ``linear``, ``knn`` or ``embedding`` probe of a run folder, a checkpoint or ``random``.

    Args:
        base: config as YAML text, which ``config_file`` overrides (default: the config of the run ``weights``).
    """
    cfg = _load(config_file, overrides, base or read_pretrain_config(weights))
    run = Path(weights)
    output = f"runs/{stage}_{run.stem}" if weights == "random" or run.is_file() else str(run / stage)
    if weights == "random":
        return _build(stage, cfg, output, (weights,))
    target = _make_absolute(weights)
    return _build(stage, cfg, output, (target,), inputs={target: ""})


def build_convert(source: str, output: str, folder: str = "", options: Mapping[str, Any] | None = None) -> StageSpec:
    """Build the conversion of a run or checkpoint to Detectron2 weights at ``output``; its run folder is next to it.

    Args:
        options: values of options of `convert`, by name; other names are ignored.
    """
    parameters = inspect.signature(convert).parameters.values()
    defaults = {option.name: option.default for option in parameters if option.kind is option.KEYWORD_ONLY}
    changed = {name: value for name, value in (options or {}).items() if value != defaults.get(name, value)}
    source = _make_absolute(source)
    target = _make_absolute(output)
    args = ([source, target], changed) if changed else ([source, target],)
    return _build_tool("convert", folder or f"{target}.run", args, target, {source: ""})


def run_conversion(words: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
    """Run convert_to_d2.py in a job."""
    convert_to_d2.run(*words, **(options or {}))


def build_transfer(
    config_file: str, overrides: Sequence[str] = (), *, engine: str = "", eval_only: bool = False, visualize: int = 0
) -> StageSpec:
    """Build the fine-tuning stage of a Detectron2 YAML, in OUTPUT_DIR or runs/<config file>.

    The YAML is read immediately, so that later edits do not change a queued job. An evaluation has a run folder of its
    own, eval_only/ in the training's, so that the training's record and results are kept.

    Args:
        engine: if it is empty or auto, Detectron2 where it is installed.
    """
    if engine in ("", "auto"):
        engine = _choose_installed_engine()
    preflight.check_engine_name(engine)
    cfg = fine_tuning.load_config(config_file, overrides)
    is_named = "OUTPUT_DIR" in overrides or cfg.OUTPUT_DIR != fine_tuning.default_config().OUTPUT_DIR
    output = _make_absolute(cfg.OUTPUT_DIR if is_named else f"runs/{Path(config_file).stem}")
    if eval_only:
        output = str(Path(output) / "eval_only")
    arguments = TransferArguments(engine, output, eval_only, visualize)
    inputs = _list_weights(cfg)
    return StageSpec(
        "transfer", output, ENTRIES["transfer"], fine_tuning.dump(cfg), args=(arguments.to_words(),), inputs=inputs
    )


def run_fine_tuning(config: str, words: Sequence[str], *, job: Job) -> None:
    """Fine-tune or evaluate with a config as YAML text, in each process of a job."""
    api.start(prepare_fine_tuning(config, words), job)


def prepare_fine_tuning(config: str, words: Sequence[str], world_size: int | None = None) -> api.Run:
    """Check the config of a stage and the words of its `TransferArguments`; see `transfer.api.prepare`."""
    arguments = TransferArguments.from_words(words)
    cfg = fine_tuning.from_yaml_text(config, ["OUTPUT_DIR", arguments.output])
    is_evaluation = arguments.eval_only
    options = {"resume": not is_evaluation, "eval_only": is_evaluation, "visualize": arguments.visualize}
    return api.prepare(cfg, arguments.engine, world_size, **options)


def build_data(words: Sequence[str], folder: str) -> StageSpec:
    """Build the stage that runs tools/make_data.py; the last of its ``words`` is the folder of the data."""
    return _build_tool("data", folder, ([*words[:-1], "--output", words[-1]],), words[-1], {})


def build_report(folder: Path) -> StageSpec:
    """Build the stage that writes report.md and report.html of the pipeline in ``folder``."""
    words = [str(folder), "--output", str(folder / "report.md"), "--output", str(folder / "report.html")]
    return _build_tool("report", str(folder / "report"), (words,), str(folder / "report.md"), {})


def _build_tool(stage: str, folder: str, args: tuple[Any, ...], product: str, inputs: dict[str, str]) -> StageSpec:
    folder = _make_absolute(folder)
    on_cpu: dict[str, Any] = {"one_process": True, "gpu": False, "inputs": inputs}
    return StageSpec(stage, folder, ENTRIES[stage], args=args, produces=_make_absolute(product), **on_cpu)


def read_pretrain_config(run: str) -> str:
    """Return the resolved config of a run as YAML text; "" for a detector's, or if ``run`` is not a run folder.

    Names that are relative to the folder that the run was started in are found from this one, too.
    """
    path = Path(run) / "config.yaml"
    state = read_state(run)
    if state.get("stage") == "transfer" or not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    folder = state.get("cwd", "")
    return text if folder in ("", find_working_folder()) else pretraining.resolve_paths(text, folder)


def _load(config_file: str | Path, overrides: Sequence[str], base: str = "") -> Any:
    cfg = pretraining.from_yaml_text(base).clone() if base else pretraining.default_config()
    cfg.defrost()
    cfg.OUTPUT_DIR = ""  # the one of ``base`` belongs to another stage
    named = pretraining.merge(cfg, config_file, overrides)
    if not base:
        pretraining.set_data_set_defaults(cfg, named)
    pretraining.check_config(cfg)
    if not base:
        pretraining.record_modules(cfg)
    return cfg


def _list_weights(cfg: Any) -> dict[str, str]:
    """Return MODEL.WEIGHTS as the inputs of a stage, unless it is a URL."""
    weights = cfg.MODEL.WEIGHTS
    return {weights: ""} if weights and "://" not in weights else {}


def _build(stage: str, cfg: Any, output: str, args: tuple[Any, ...], **fields: Any) -> StageSpec:
    cfg.OUTPUT_DIR = _make_absolute(cfg.OUTPUT_DIR or output)
    return StageSpec(stage, cfg.OUTPUT_DIR, ENTRIES[stage], config=dump(cfg), args=args, **fields)


@functools.cache  # print the note once for all detectors of a pipeline
def _choose_installed_engine() -> str:
    engine = preflight.choose_engine("auto")
    if engine == "torchvision":
        print(preflight.FALLBACK_NOTE, file=sys.stderr)
    return engine


def _make_absolute(path: str) -> str:
    return str(Path(path).absolute())
