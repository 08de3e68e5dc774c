"""Builds the spec of each stage, its config resolved and checked, from what a command line or a pipeline file names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, nearest

from .spec import StageSpec, read_json
from .submit import ROOT

# The recipe that stands for a method where none is named: its paper's on ImageNet-1K.
_RECIPES = ROOT / "configs" / "pretrain"
_ENGINES = ("auto", "detectron2", "torchvision")  # as transfer/train_net.py has them


def recipe_of(method: str) -> Path:
    """The default recipe of a method: configs/pretrain/<method>_R50_IN1k_200ep.yaml.

    Raises:
        UserError: no such method.
    """
    path = _RECIPES / f"{method}_R50_IN1k_200ep.yaml"
    if not path.is_file():
        known = sorted(p.name.split("_")[0] for p in _RECIPES.glob("*_R50_IN1k_200ep.yaml"))
        raise UserError(
            f"no default recipe for --method {method} (there are {', '.join(known)}){nearest(method, known)}"
        )
    return path


def pretrain(config_file: str | Path, overrides: Sequence[str] = (), folder: str = "") -> StageSpec:
    """Pretraining by a recipe; ``folder`` is for a recipe and overrides without OUTPUT_DIR (default runs/<recipe>)."""
    cfg = _load(config_file, overrides)
    output = cfg.OUTPUT_DIR or folder or f"runs/{Path(config_file).stem}"
    return _spec("pretrain", "pretrain.train:main", cfg, output, ())


def probe(
    stage: str, weights: str, config_file: str = "", overrides: Sequence[str] = (), folder: str = "", base: str = ""
) -> StageSpec:
    """The ``linear``, ``knn`` or ``embedding`` probe of a run folder, a checkpoint or ``random``.

    Args:
        base: config as YAML text under ``config_file``; empty: that of the run ``weights``, where it is one.
    """
    cfg = _load(config_file, overrides, base or pretrain_config(weights))
    run = Path(weights)
    default = f"runs/{stage}_{run.stem}" if weights == "random" or run.is_file() else str(run / stage)
    output = folder or _override(overrides, "OUTPUT_DIR") or default
    target = weights if weights == "random" else _absolute(weights)
    return _spec(stage, f"pretrain.probe.{stage}:main", cfg, output, (target,))


def distributions(runs: Sequence[str], overrides: Sequence[str] = (), folder: str = "") -> StageSpec:
    """Fig. 3 of JCL for several runs; data and views are the first one's."""
    cfg = _load("", overrides, pretrain_config(runs[0]))
    names = {_label(run): _absolute(run) for run in runs}
    if len(names) < len(runs):
        names = {str(run): _absolute(run) for run in runs}
    output = _override(overrides, "OUTPUT_DIR") or folder
    spec = _spec("distributions", "pretrain.probe.distributions:main", cfg, output, (names,))
    return dataclasses.replace(spec, one_process=True)


def convert(source: str, output: str, words: Sequence[str] = (), folder: str = "") -> StageSpec:
    """Conversion of a run or checkpoint to Detectron2 weights at ``output``; the run folder is beside it."""
    target = Path(output).absolute()
    folder = folder or str(target.with_name(target.name + ".run"))
    return StageSpec(
        "convert", _absolute(folder), "tools.convert_to_d2:main", args=([_absolute(source), str(target), *words],),
        produces=str(target), one_process=True, gpu=False,
    )  # fmt: skip


def transfer(config_file: str, words: Sequence[str] = (), folder: str = "") -> StageSpec:
    """Fine-tuning by a Detectron2 YAML; ``words`` are those of transfer/train_net.py."""
    path = Path(config_file)
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")]) if path.parent.is_dir() else ""
        raise UserError(f"no config file at {path}{near}")
    engine = _override(words, "--engine")
    if "--engine" in words and engine not in _ENGINES:  # before a job is submitted that would fail by it
        raise UserError(f"engine {engine!r} is not one of {', '.join(_ENGINES)}{nearest(engine, _ENGINES)}")
    output = _override(words, "OUTPUT_DIR") or folder or f"runs/{path.stem}"
    words = _without(words, "OUTPUT_DIR")
    argv = ["--config-file", str(path.absolute()), "--resume", *words, "OUTPUT_DIR", _absolute(output)]
    return StageSpec("transfer", _absolute(output), "transfer.train_net:main", args=(argv,))


def make_data(words: Sequence[str], produces: str, folder: str) -> StageSpec:
    """Data that tools/make_data.py makes."""
    return StageSpec(
        "data", _absolute(folder), "tools.make_data:main", args=(list(words),), produces=_absolute(produces),
        one_process=True, gpu=False,
    )  # fmt: skip


def pretrain_config(run: str) -> str:
    """The config of a run as YAML text: resolved when it started; empty where ``run`` is no run folder."""
    text = Path(run) / "config.yaml"
    if text.is_file():
        return text.read_text()
    launched = read_json(Path(run) / "launch" / "launch.json").get("spec", {})  # submitted, not started yet
    return launched.get("config", "")


def _load(config_file: str | Path, overrides: Sequence[str], base: str = "") -> Any:
    from pretrain.common.config_io import merge_file, merge_overrides
    from pretrain.config import default_config, from_yaml_text, validate

    cfg = from_yaml_text(base).clone() if base else default_config()
    cfg.defrost()
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, overrides)
    validate(cfg)
    return cfg


def _spec(stage: str, entry: str, cfg: Any, output: str, args: tuple[Any, ...]) -> StageSpec:
    from pretrain.common.config_io import dump

    cfg.OUTPUT_DIR = _absolute(output)
    return StageSpec(stage, cfg.OUTPUT_DIR, entry, config=dump(cfg), args=args)


def _label(run: str) -> str:
    """A run's name in a legend: its folder's; the branch's where it is a pipeline's pretraining."""
    path = Path(run).absolute()
    return path.parent.name if path.name == "pretrain" else path.stem


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _override(words: Sequence[str], key: str) -> str:
    """The value of the last ``KEY VALUE`` or ``KEY=VALUE`` among the words, or an empty string."""
    value = ""
    for place, word in enumerate(words):
        if word == key and place + 1 < len(words):
            value = words[place + 1]
        elif word.startswith(f"{key}="):
            value = word.removeprefix(f"{key}=")
    return value


def _without(words: Sequence[str], key: str) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == key:
            skip = True
        elif not word.startswith(f"{key}="):
            kept.append(word)
    return kept
