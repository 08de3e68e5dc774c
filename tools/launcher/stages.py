"""Builds the spec of each stage from a command line or a pipeline file, with its config resolved and checked."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain import config as pretraining
from pretrain.common.config.yaml_io import merge_file, merge_overrides
from pretrain.common.errors import UserError, nearest
from transfer import config as fine_tuning
from transfer import train_net

from .spec import ENTRIES, ROOT, StageSpec

# The default recipe of a method: its paper's on ImageNet-1K where there is one.
_RECIPES, _RECIPE = ROOT / "configs" / "pretrain", "_R50_IN1k_200ep.yaml"
_OTHER_RECIPES = {
    "multikey": "jcl_R50_IN1k_200ep.yaml",
    "ressl": "sce_R18_cifar10_200ep.yaml",
    "supcon": "tcl_supervised_R50_cifar10_100ep.yaml",
    "tcl": "tcl_R18_IN100_400ep.yaml",
}
# What makes the recipe of another method that of this one.
_RECIPE_OVERRIDES = {
    "multikey": "METHOD.NAME multikey METHOD.JCL_LAMBDA 1.0 OUTPUT_DIR runs/multikey_R50_IN1k_200ep",
    "ressl": "METHOD.NAME ressl METHOD.TEMPERATURE 0.1 METHOD.KEY_TEMPERATURE 0.04 "
    "OUTPUT_DIR runs/ressl_R18_cifar10_200ep",
    "supcon": "METHOD.NAME supcon METHOD.K1 1.0 OUTPUT_DIR runs/supcon_R50_cifar10_100ep",
}
_ENGINES = ("auto", "detectron2", "torchvision")  # as transfer/train_net.py has them


def recipe_of(method: str) -> Path:
    """The default recipe of a method."""
    path = _RECIPES / _OTHER_RECIPES.get(method, f"{method}{_RECIPE}")
    if not path.is_file():
        raise UserError(
            f"no default recipe for --method {method} (there are {', '.join(methods())}); name your own recipe by "
            f"--config-file FILE{nearest(method, methods())}"
        )
    return path


def overrides_of(method: str) -> list[str]:
    """Return the overrides of a method whose default recipe is another method's, else none."""
    return _RECIPE_OVERRIDES.get(method, "").split()


def methods() -> list[str]:
    """The methods that have a default recipe."""
    return sorted([*_OTHER_RECIPES, *(path.name.split("_")[0] for path in _RECIPES.glob(f"*{_RECIPE}"))])


def pretrain(config_file: str | Path, overrides: Sequence[str] = ()) -> StageSpec:
    """Pretraining by a recipe, in OUTPUT_DIR or runs/<recipe>."""
    cfg = _load(config_file, overrides)
    return _spec("pretrain", cfg, f"runs/{Path(config_file).stem}", (), inputs=_weights(cfg))


def probe(stage: str, weights: str, config_file: str = "", overrides: Sequence[str] = (), base: str = "") -> StageSpec:
    """The ``linear``, ``knn`` or ``embedding`` probe of a run folder, a checkpoint or ``random``.

    Args:
        base: config as YAML text under ``config_file``; empty: that of the run ``weights``, where it is one.
    """
    cfg = _load(config_file, overrides, base or pretrain_config(weights))
    run = Path(weights)
    output = f"runs/{stage}_{run.stem}" if weights == "random" or run.is_file() else str(run / stage)
    if weights == "random":
        return _spec(stage, cfg, output, (weights,))
    target = _absolute(weights)
    return _spec(stage, cfg, output, (target,), inputs={target: ""})


def distributions(
    runs: Sequence[str], overrides: Sequence[str] = (), folder: str = "", config_file: str = "", base: str = ""
) -> StageSpec:
    """Fig. 3 of JCL for several runs; data and views are the first one's. ``base``: see `probe`."""
    cfg = _load(config_file, overrides, base or pretrain_config(runs[0]))
    paths = [run if run == "random" else _absolute(run) for run in runs]
    names = dict(zip(map(_label, runs), paths, strict=True))
    if len(names) < len(runs):
        names = dict(zip(map(str, runs), paths, strict=True))
    inputs = {path: "" for path in paths if path != "random"}
    return _spec("distributions", cfg, folder, (names,), one_process=True, inputs=inputs)


def convert(source: str, output: str, folder: str = "", options: Sequence[str] = ()) -> StageSpec:
    """Conversion of a run or checkpoint to Detectron2 weights at ``output``; the run folder is next to it."""
    target, source = _absolute(output), _absolute(source)
    return StageSpec(
        "convert", _absolute(folder or f"{target}.run"), ENTRIES["convert"], args=([source, target, *options],),
        produces=target, one_process=True, gpu=False, inputs={source: ""},
    )  # fmt: skip


def transfer(
    config_file: str, overrides: Sequence[str] = (), *, engine: str = "", eval_only: bool = False, visualize: int = 0
) -> StageSpec:
    """Fine-tuning by a Detectron2 YAML, in OUTPUT_DIR or runs/<config file>.

    The YAML is read immediately, so that later edits do not change a queued job. An evaluation has a run folder of its
    own, eval_only/ in that of the training, so that the training's record and results stay.

    Args:
        engine: empty or auto: Detectron2 where it is installed.
    """
    if engine not in ("", *_ENGINES):
        raise UserError(f"engine {engine!r} is not one of {', '.join(_ENGINES)}{nearest(engine, _ENGINES)}")
    cfg = fine_tuning.load_config(config_file, overrides)
    is_named = "OUTPUT_DIR" in overrides or cfg.OUTPUT_DIR != fine_tuning.default_config().OUTPUT_DIR
    output = _absolute(cfg.OUTPUT_DIR if is_named else f"runs/{Path(config_file).stem}")
    output = str(Path(output) / "eval_only") if eval_only else output
    engine = _installed_engine() if engine in ("", "auto") else engine
    words = ["--eval-only" if eval_only else "--resume", "--engine", engine]
    words += ["--visualize", str(visualize)] if visualize else []
    return StageSpec(
        "transfer", output, ENTRIES["transfer"], config=cfg.dump(), args=([*words, "OUTPUT_DIR", output],),
        inputs=_weights(cfg),
    )  # fmt: skip


def fine_tune(config: str, words: Sequence[str]) -> None:
    """Runs transfer/train_net.py with a config as YAML text, in each process of a job."""
    with config_file(config) as file:
        train_net.main(["--config-file", file, *words])


@contextlib.contextmanager
def config_file(text: str) -> Iterator[str]:
    """The path of a YAML file that holds ``text`` until the block ends."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield file.name


def make_data(words: Sequence[str], folder: str) -> StageSpec:
    """Data that tools/make_data.py makes; the last of its ``words`` is their folder."""
    return StageSpec(
        "data", _absolute(folder), ENTRIES["data"], args=(list(words),), produces=_absolute(words[-1]),
        one_process=True, gpu=False,
    )  # fmt: skip


def report(folder: Path) -> StageSpec:
    """Writes report.md and report.html of the pipeline or sweep in ``folder``."""
    words = [str(folder), "--output", str(folder / "report.md"), "--output", str(folder / "report.html")]
    return StageSpec(
        "report", str(folder / "report"), ENTRIES["report"], args=(words,), produces=str(folder / "report.md"),
        one_process=True, gpu=False,
    )  # fmt: skip


def pretrain_config(run: str) -> str:
    """The config of a run as YAML text: resolved when it started; empty where ``run`` is no run folder."""
    path = Path(run) / "config.yaml"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _load(config_file: str | Path, overrides: Sequence[str], base: str = "") -> Any:
    cfg = pretraining.from_yaml_text(base).clone() if base else pretraining.default_config()
    cfg.defrost()
    cfg.OUTPUT_DIR = ""  # that of ``base`` is another stage's
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, overrides)
    pretraining.validate(cfg)
    if not base:
        pretraining.record_modules(cfg)
    return cfg


def _weights(cfg: Any) -> dict[str, str]:
    """MODEL.WEIGHTS, unless it is an address."""
    weights = cfg.MODEL.WEIGHTS
    return {weights: ""} if weights and "://" not in weights else {}


def _spec(stage: str, cfg: Any, output: str, args: tuple[Any, ...], **given: Any) -> StageSpec:
    cfg.OUTPUT_DIR = _absolute(cfg.OUTPUT_DIR or output)
    return StageSpec(stage, cfg.OUTPUT_DIR, ENTRIES[stage], config=cfg.dump(), args=args, **given)


@functools.cache
def _installed_engine() -> str:
    if importlib.util.find_spec("detectron2") is not None:
        return "detectron2"
    print("Detectron2 is not installed; fine-tuning uses the torchvision engine", file=sys.stderr)
    return "torchvision"


def _label(run: str) -> str:
    """A run's name in a legend: its folder's; the branch's where it is a pipeline's pretraining."""
    path = Path(run).absolute()
    return path.parent.name if path.name == "pretrain" else path.stem


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
