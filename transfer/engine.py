"""The base class of the engines, and the data and evaluation loops that they share."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from torch import nn

from pretrain.common import distributed
from pretrain.common.errors import UserError, count_noun
from pretrain.common.interrupt import StopRequest
from pretrain.common.ranks.agreement import AgreedStop, on_first_rank

from .coco.records import DataSet
from .coco.results import Detection, Metrics, draw_saved, score
from .distributed import log_progress
from .training.samplers import MappedRecords, Mapper, ModelInput, Record, TrainingData, load_batches

log = logging.getLogger(__name__)


class Storage:
    """Scalars from hooks, with the methods of Detectron2's EventStorage; metrics.json gets those of its iteration."""

    def __init__(self, start: int) -> None:
        self.iter = start
        self._latest: dict[str, tuple[int, float]] = {}

    def put_scalar(self, name: str, value: float, **_: Any) -> None:
        self._latest[name] = (self.iter, float(value))

    def put_scalars(self, *, smoothing_hint: bool = True, **values: float) -> None:
        for name, value in values.items():
            self.put_scalar(name, value)

    def scalars(self) -> dict[str, float]:
        """Return the scalars of this iteration."""
        return {name: value for name, (iteration, value) in self._latest.items() if iteration == self.iter}

    def take_images(self) -> Iterator[tuple[str, Any, int]]:
        """Yield the model's figures (name, image, iteration) since the last call."""
        return iter(())


class Engine(ABC):
    """Builds the parts of a detector's training and evaluation from a config; `Trainer` runs them.

    Attributes:
        name: the engine's name in checkpoints and results.
        frozen_norm: the class of batch norms whose statistics are fixed.
        pin_memory: batches are loaded into pinned memory.
        cfg: the engine's own config.
        data_sets: the files of DATASETS.TRAIN and DATASETS.TEST, by name.
        stop: the ranks' agreement on a stop of the run.
    """

    name: ClassVar[str]
    frozen_norm: ClassVar[type[nn.Module]]
    pin_memory: bool = False

    def __init__(self, cfg: CfgNode, data_sets: Mapping[str, DataSet], stop: AgreedStop | None = None) -> None:
        self.cfg = cfg
        self.data_sets = data_sets
        self.stop = stop or AgreedStop(StopRequest(), torch.device("cpu"))  # of one that nothing stops

    @abstractmethod
    def build_model(self, device: torch.device) -> nn.Module:
        """Build a detector, which maps a list of images to losses by name (in training) or to its detections."""

    @abstractmethod
    def run_backbone(self, model: Any, batch: list[ModelInput]) -> None:
        """Run the ResNet alone on the images of a batch."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer, whose step clips gradients as SOLVER.CLIP_GRADIENTS says."""

    @abstractmethod
    def build_schedule(self, optimizer: torch.optim.Optimizer) -> Callable[[int], float]:
        """Build a function of the iteration (from 0) that sets the learning rate and returns it."""

    @abstractmethod
    def load_training_set(self) -> tuple[Sequence[Record], Sequence[float], Sequence[bool] | None, Mapper]:
        """Load DATASETS.TRAIN.

        Returns:
            The records; their repeat factors (at least 1); with DATALOADER.ASPECT_RATIO_GROUPING, whether each image is
            wider than high, or else None; the records' mapper.
        """

    @abstractmethod
    def load_test_set(self, name: str) -> tuple[Sequence[Record], list[int]]:
        """Load the records of a set of DATASETS.TEST; return them and its category ids in the order of the labels."""

    @abstractmethod
    def build_test_mapper(self) -> Mapper:
        """Build the mapper of records to the model's input in an evaluation."""

    @abstractmethod
    def detect(self, model: Any, batch: list[ModelInput], category_ids: list[int]) -> list[Detection]:
        """Return the model's detections on all images of a batch, with the category id of each label."""

    @abstractmethod
    def map_example(self, record: Record, *, is_train: bool) -> ModelInput:
        """Map the record of a made-up image, whose annotations are COCO's, to the model's input."""

    def build_augmented(self, model: Any) -> Any:
        """Build the detector that the last evaluation also runs, with test-time augmentation; None for no other."""
        return None

    def storage(self, start: int) -> AbstractContextManager[Storage]:
        """Return a context that collects the values and figures that the model and hooks log."""
        return nullcontext(Storage(start))

    def load_training_data(self) -> TrainingData:
        """Load the training images.

        Raises:
            UserError: no image has annotations.
        """
        records, repeat_factors, wide, mapper = self.load_training_set()
        if not records:
            names = ", ".join(self.cfg.DATASETS.TRAIN)
            raise UserError(f"no image of {names} has annotations to train on; annotate them, or name another data set")
        if distributed.is_first_rank():
            self._log_skipped_images(len(records))
        batch_size = self.cfg.SOLVER.IMS_PER_BATCH // distributed.world_size()
        return TrainingData(records, repeat_factors, mapper, batch_size, wide, self.pin_memory)

    def _log_skipped_images(self, num_used: int) -> None:
        """Log how many training images have no objects, or too few labeled keypoints, and are not used."""
        data_sets = [self.data_sets[name] for name in self.cfg.DATASETS.TRAIN]
        total = sum(len(data_set.image_sizes) for data_set in data_sets)
        num_skipped = total - num_used
        if num_skipped <= 0:  # negative where a data set's images are not counted
            return
        cfg = self.cfg
        num_empty = num_skipped
        if cfg.MODEL.KEYPOINT_ON:
            num_empty = min(num_skipped, sum(data_set.num_empty for data_set in data_sets))
        fewest = count_noun(cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE, "labeled keypoint")
        counts = {"without objects": num_empty, f"with fewer than {fewest}": num_skipped - num_empty}
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        filtering = f"DATALOADER.FILTER_EMPTY_ANNOTATIONS {cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS}"
        log.info(f"skipping {num_skipped:,} of {count_noun(total, 'training image')}: {reasons} ({filtering})")

    def test_images(self, records: Sequence[Record]) -> MappedRecords:
        """Return records as an evaluation gives them to the model."""
        return MappedRecords(records, self.build_test_mapper())

    @torch.no_grad()
    def run_on_test_set(
        self, model: nn.Module, records: Sequence[Record], detect: Callable[[list[ModelInput]], list[Any]]
    ) -> list[Any]:
        """Call ``detect`` on this rank's records, one image at a time, with the model in evaluation mode.

        Returns:
            Every rank's results, in rank order, on rank 0; [] on other ranks.

        Raises:
            Stopped: a stop was requested on one of the ranks.
        """
        items = [[(index, index)] for index in range(len(records))[distributed.rank_slice(len(records))]]
        workers = self.cfg.DATALOADER.NUM_WORKERS
        options: dict[str, Any] = {"pin_memory": self.pin_memory, "stop": self.stop.request}
        batches = load_batches(self.test_images(records), items, workers, **options)
        results: list[Any] = []
        was_training = model.training
        model.eval()
        for batch in log_progress(batches, len(items), "evaluation"):
            if self.stop.request.reason:
                break
            results += detect(batch)
        model.train(was_training)
        self.stop.raise_now()
        if distributed.world_size() == 1:
            return results
        gathered: list[Any] | None = [None] * distributed.world_size() if distributed.is_first_rank() else None
        dist.gather_object(results, gathered)
        return [result for rank_results in gathered or () for result in rank_results]

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return the metrics of each set of DATASETS.TEST."""
        return {name: self.evaluate_set(model, name) for name in self.cfg.DATASETS.TEST}

    def complete_evaluation(
        self, model: nn.Module, metrics: Mapping[str, Metrics], visualize: int
    ) -> dict[str, Metrics]:
        """Return the metrics of the last evaluation of a run with what only this one has, and draw its predictions.

        Args:
            metrics: what `evaluate` has returned for this model.
            visualize: number of images per set on which to draw the predictions.
        """
        for name in metrics if visualize else ():
            on_first_rank(draw_saved, self.cfg, self.data_sets[name], visualize)
        return dict(metrics)

    def evaluate_set(self, model: nn.Module, name: str, *, keep: bool = True) -> Metrics:
        """Return the metrics of one set, which rank 0 computes; ``keep`` writes the predictions."""
        records, category_ids = self.load_test_set(name)
        detections = self.run_on_test_set(model, records, partial(self.detect, model, category_ids=category_ids))
        return on_first_rank(score, self.cfg, self.data_sets[name], detections, keep=keep)
