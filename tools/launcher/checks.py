"""What a stage would refuse at its start, refused before a job is submitted and without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fvcore.common.config import CfgNode

from pretrain.common.run_folder import refuse_other_stage

from .options import Options
from .spec import StageSpec
from .stages import config_file, pretrain_config


def refuse_missing_engine(specs: Iterable[StageSpec]) -> None:
    """Checks that the engines of the fine-tunings that are not complete are installed, and can honor their configs.

    Raises:
        UserError: Detectron2 is chosen but not installed, or the torchvision engine for what only Detectron2 can do.
    """
    from transfer import early
    from transfer.train_net import pick_engine

    for spec in specs:
        if spec.stage == "transfer" and not spec.is_complete():
            engine = pick_engine(spec.args[0][spec.args[0].index("--engine") + 1])
            early.refuse_unsupported(_detector_config(spec), engine, eval_only=_is_evaluation(spec))


def refuse_missing_data(spec: StageSpec, *, download: bool = True) -> None:
    """Checks that the images that a stage reads and the weights that it starts from exist.

    Args:
        download: weights at an address, too.

    Raises:
        UserError: one of them does not, or a probe's own images have no labels or no val split.
    """
    is_new = not Path(spec.folder).exists()  # a resumed run may no longer need its weights
    if spec.stage == "transfer":
        from transfer import early

        cfg = _detector_config(spec)
        weights = is_new and (download or "://" not in cfg.MODEL.WEIGHTS)
        early.refuse_inputs(cfg, eval_only=_is_evaluation(spec), weights=weights)
    elif spec.config:
        from pretrain import preflight
        from pretrain.config import from_yaml_text

        preflight.refuse_missing_data(from_yaml_text(spec.config), spec.stage, weights=is_new)


def refuse_indivisible(spec: StageSpec, options: Options, *, count: bool = True) -> None:
    """Checks that a batch can be divided among the processes, and that the data of a pretraining hold one.

    Args:
        count: the data, unless the stage runs on a cluster, whose nodes may have other disks.

    Raises:
        UserError: it cannot, or they do not.
    """
    if spec.stage == "pretrain":
        from pretrain import preflight
        from pretrain.config import from_yaml_text

        cfg = from_yaml_text(spec.config)
        preflight.refuse_indivisible(cfg, _world_size(spec, options), data=count and options.cluster != "slurm")
    elif spec.stage == "transfer" and not _is_evaluation(spec):
        from transfer.config import scale_to_world
        from transfer.config_ranges import check_parts

        world = _world_size(spec, options)
        check_parts(scale_to_world(_detector_config(spec), world), world)


def _world_size(spec: StageSpec, options: Options) -> int:
    options = options.fitting(spec)
    return 1 if options.cluster == "debug" else options.nodes * options.tasks_per_node


def refuse_other_run(spec: StageSpec, options: Options) -> None:
    """Checks that the run folder is new, or holds a part of the same run.

    Raises:
        UserError: it belongs to another stage, or to a run of another config.
    """
    folder = Path(spec.folder)
    refuse_other_stage(folder, "evaluation" if _is_evaluation(spec) else spec.stage)
    if spec.stage == "transfer":
        if not _is_evaluation(spec):
            _refuse_other_training(spec, options)
        return
    earlier, kept = pretrain_config(spec.folder), str(folder / "config.yaml")
    has_checkpoint = any(folder.glob("checkpoint_*.pth"))
    if earlier and spec.stage == "pretrain" and has_checkpoint:
        from pretrain.config import check_same_run, from_yaml_text

        check_same_run(from_yaml_text(spec.config), earlier, kept, folder)
    if earlier and spec.stage == "linear" and (has_checkpoint or (folder / "results.json").exists()):
        from pretrain.config import from_yaml_text
        from pretrain.probe.protocol import check_same_probe, linear_settings

        before, now = from_yaml_text(earlier, kept), from_yaml_text(spec.config)
        check_same_probe(folder, linear_settings(before), linear_settings(now))


def _refuse_other_training(spec: StageSpec, options: Options) -> None:
    from transfer.config import check_same_training, scale_to_world

    cfg = _detector_config(spec)
    if any(name.endswith(":skip_bad") for name in cfg.DATASETS.TRAIN):
        return  # the run may have trained on a cleaned copy under another name
    check_same_training(scale_to_world(cfg, _world_size(spec, options)), Path(spec.folder) / "config.yaml")


def _detector_config(spec: StageSpec) -> CfgNode:
    from transfer.config import load_config

    with config_file(spec.config) as file:
        return load_config(file, ["OUTPUT_DIR", spec.folder])


def _is_evaluation(spec: StageSpec) -> bool:
    return spec.stage == "transfer" and "--eval-only" in spec.args[0]
