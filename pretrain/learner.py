"""Encoders, objective and optimiser: everything one optimiser step changes."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.models import ResNet

from . import distributed, schedule, views
from .common import interrupt, process_group
from .common.backbone_file import load_backbone
from .common.config_io import dump
from .common.copies import AsyncHostCopy, to_device
from .common.errors import UserError
from .common.weights_file import tensor_digest
from .encoder import build_encoder
from .loader import Batch
from .methods import METHODS, Objective
from .optim import build_optimizer
from .queue import NegativeQueue
from .siamese import SiameseEncoder, encode

_OTHER_FOLDER = "choose another OUTPUT_DIR"
_MAX_SKIPPED = 50  # fp16 steps in a row; the scale has then fallen by 2^50, and no smaller one will help


class Learner:
    """Encoders, objective and optimiser: everything one step changes.

    Args:
        say: takes a line for the log.
        resumes: `load` follows, so MODEL.WEIGHTS, which may be gone by now, is not read.

    Attributes:
        skipped_steps: fp16 optimizer steps left out so far because the scaled gradients overflowed.
    """

    def __init__(self, cfg: CfgNode, device: torch.device, say, resumes: bool = False) -> None:
        self.cfg, self.device, self.say = cfg, device, say
        self.method = METHODS[cfg.METHOD.NAME]
        torch.manual_seed(cfg.SEED)  # initial weights and queue: the same on every rank
        groups = local_bn_groups(cfg, say)
        # Of the global batch; these are what a run on another number of processes must have, too.
        self.bn_groups = 1 if cfg.MODEL.BN_GROUPS == 1 else len(groups) * distributed.world_size()
        encoder = build_encoder(
            cfg.MODEL.ARCH, cfg.MODEL.STEM, hidden_dims=cfg.MODEL.HEAD_HIDDEN_DIMS, head_bn=cfg.MODEL.HEAD_BN,
            dim=cfg.MODEL.EMBEDDING_DIM, bn_groups=groups,
        )  # fmt: skip
        if cfg.MODEL.WEIGHTS and not resumes:
            _start_from(encoder, cfg)
        if cfg.MODEL.BN_GROUPS == 1 and distributed.world_size() > 1:
            if device.type != "cuda":
                raise UserError(
                    f"MODEL.BN_GROUPS is 1 with {distributed.world_size()} processes: that is SyncBN, which torch has "
                    "on GPUs only; start one process, or set MODEL.BN_GROUPS 0 (one a process)"
                )
            encoder = nn.SyncBatchNorm.convert_sync_batchnorm(encoder)
        queue = NegativeQueue(cfg.MODEL.EMBEDDING_DIM, cfg.MODEL.QUEUE_SIZE) if self.method.kind == "queue" else None
        self.siamese = SiameseEncoder(encoder, queue).to(device)
        if cfg.SOLVER.CHANNELS_LAST:
            self.siamese.to(memory_format=cast(Any, torch.channels_last))
        if cfg.SOLVER.COMPILE:
            self.siamese.encoder_q.compile()
            if self.siamese.encoder_k is not None:
                self.siamese.encoder_k.compile()
        self.encoder = cast(ResNet, self.siamese.encoder_q)
        self.optimizer = build_optimizer(self.encoder, cfg.SOLVER)
        self.amp_dtype = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[cfg.SOLVER.AMP]
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16")
        self.siamese.train()
        self.query_forward = process_group.data_parallel(self.encoder, device)
        self._buffers = [b for b in self.siamese.buffers() if b.is_floating_point() and b.ndim == 1]
        self._control: AsyncHostCopy | None = None  # what `_watch` sent of the step before
        self._stop = False  # what all ranks agreed on in the step before the last
        self.skipped_steps = self._skipped_in_a_row = 0

    def step(self, batch: Batch, step: int, progress: float, epoch: int, lr: float, data) -> Objective:
        """One optimiser step on this rank's share of the batch; returns the objective with this rank's numbers."""
        cfg, total = self.cfg, self.cfg.SOLVER.IMS_PER_BATCH
        images = batch.views_VNCHW.to(self.device, non_blocking=True)
        images = views.finish(images, batch.params)
        hyper = {name: _leaf(cfg, key) for name, key in self.method.hyper.items()}
        if cfg.METHOD.NAME == "jcl":
            hyper["lambda_"] = schedule.strength(epoch, cfg.SOLVER.EPOCHS, hyper["lambda_"], cfg.METHOD.LAMBDA_SCHEDULE)
        momentum = schedule.ema_momentum(progress, cfg.MODEL.EMA_MOMENTUM, cfg.MODEL.EMA_SCHEDULE)
        with torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
            if self.method.kind == "queue":
                if cfg.MODEL.EMA_UPDATE == "before_keys":
                    self.siamese.update_keys(momentum)
                shuffle = torch.Generator().manual_seed(cfg.SEED * 1_000_003 + step)
                keys_MND = self.siamese.encode_keys(images[1:], total, shuffle, self._prepare)
                q_ND = self._encode_queries(images[0])
            else:
                # Image by image, not view by view: a BN group then holds all views of its images, as a rank's does.
                q_ND = self._encode_queries(images.transpose(0, 1).flatten(0, 1))
        if self.method.kind == "queue":
            assert self.siamese.negatives is not None
            objective = self.method.objective(q_ND, keys_MND, self.siamese.negatives.queue, **hyper)
        else:
            objective = self._in_batch(q_ND, batch, hyper)
        # DDP averages over ranks; a rank with more images must weigh more for the global mean.
        share = images.shape[1] * distributed.world_size() / total
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(objective.loss * share).backward()
        scale = self.scaler.scale(torch.ones((), device=self.device))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        scales = torch.stack([scale, self.scaler.scale(torch.ones_like(scale))])  # it falls where the step was skipped
        if self.method.kind == "queue":
            if cfg.MODEL.EMA_UPDATE == "after_step":
                self.siamese.update_keys(momentum)
            self._enqueue(cast(Tensor, objective.enqueue_ND), total)
        self.check_finite()  # of the step before: by now its result is on the host
        self._watch(objective.loss.detach(), scales, step, lr, batch, data)
        objective.metrics["feature_spread"] = q_ND.detach().std(dim=0).mean() * q_ND.shape[1] ** 0.5
        return objective

    def _prepare(self, images: Tensor) -> Tensor:
        x = views.normalize(images)
        return x.contiguous(memory_format=torch.channels_last) if self.cfg.SOLVER.CHANNELS_LAST else x

    def _encode_queries(self, images: Tensor) -> Tensor:
        return encode(self.query_forward, self._prepare(images))

    def _in_batch(self, anchors_AD: Tensor, batch: Batch, hyper: dict[str, Any]) -> Objective:
        """Objectives whose negatives are the other images of the global batch, all ranks and views."""
        many = len(batch.views_VNCHW)
        sizes = [many * size for size in distributed.slice_sizes(self.cfg.SOLVER.IMS_PER_BATCH)]
        labels = batch.index_N if self.cfg.METHOD.LABELS == "index" else batch.label_N
        labels = torch.where(labels < 0, -1 - batch.index_N, labels)  # without a label: alike to its own views only
        labels_A = to_device(labels, self.device).repeat_interleave(many)
        start = sum(sizes[: distributed.rank()])
        candidates_BD, labels_B = (
            distributed.gather(anchors_AD, sizes, with_grad=True),
            distributed.gather(labels_A, sizes),
        )
        self_index_A = torch.arange(start, start + len(labels_A), device=self.device)
        return self.method.objective(anchors_AD, candidates_BD, labels_A, labels_B, self_index_A, **hyper)

    def _enqueue(self, vectors_nD: Tensor, total: int) -> None:
        assert self.siamese.negatives is not None
        self.siamese.negatives.enqueue(distributed.gather(vectors_nD, distributed.slice_sizes(total)))

    @torch.no_grad()
    def _watch(self, loss: Tensor, scales: Tensor, step: int, lr: float, batch: Batch, data) -> None:
        """Starts the copy of what the host must know to the host, and makes BN statistics the mean over ranks.

        That is: is the loss not finite here? anywhere? was a rank asked to stop? the loss scale before and after the
        step. One collective per step carries all of it. Averaged statistics are those of the averaged moments, so a
        checkpoint of rank 0 speaks for every rank and resuming loses nothing.
        """
        here = (~loss.isfinite()).float()
        shared = torch.stack([here, torch.full_like(loss, bool(interrupt.stop_requested()))])
        if distributed.world_size() > 1:
            flat = distributed.mean_(torch.cat([shared, *self._buffers]))
            torch._foreach_copy_(self._buffers, list(flat[2:].split([b.numel() for b in self._buffers])))
            shared = flat[:2]
        self._control = AsyncHostCopy(torch.cat([here[None], shared, scales]))
        self._suspect = (step, lr, batch.index_N, data)

    def check_finite(self) -> None:
        """Reads what `_watch` sent.

        Raises:
            UserError: the loss was not finite on some rank (it names step, learning rate and that rank's images), or
                50 steps in a row were skipped. Every rank raises the same.
        """
        if self._control is None:
            return
        here, anywhere, stop, scale, next_scale = self._control.read().tolist()
        self._control = None
        self._stop = stop > 0
        step, lr, indices, data = self._suspect
        if anywhere > 0:
            names = ", ".join(data.image_name(int(i)) for i in indices[:8]) + (", ..." if len(indices) > 8 else "")
            named = process_group.gather_objects(names if here > 0 else "")
            rank, images = next((rank, images) for rank, images in enumerate(named) if images)
            where = f" on rank {rank}" if distributed.world_size() > 1 else ""
            raise UserError(
                f"loss is not finite at step {step}{where} (learning rate {lr:.4g}; images: {images}); lower "
                "SOLVER.BASE_LR, raise SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
            )
        skipped = next_scale < scale
        self.skipped_steps += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= _MAX_SKIPPED:
            raise UserError(
                f"fp16: the {_MAX_SKIPPED} steps up to step {step} were all skipped, their gradients overflow even at "
                f"a loss scale of {scale:.3g}; set SOLVER.AMP bf16 or none, or lower SOLVER.BASE_LR"
            )

    def precision(self) -> dict[str, float]:
        """For the log: loss_scale and skipped_steps of fp16; nothing otherwise."""
        if not self.scaler.is_enabled():
            return {}
        return {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.skipped_steps}

    def stop_agreed(self) -> str:
        """The reason to stop, if any rank was asked to; the same answer on every rank.

        It is the answer of the step before the last, which is on the host already: waiting for the last one's would
        leave the device without work after every step.
        """
        if distributed.world_size() == 1:
            return interrupt.stop_requested()
        return (interrupt.stop_requested() or "another rank was asked to stop") if self._stop else ""

    def state(self, cfg: CfgNode, step: int, steps_per_epoch: int) -> dict[str, Any]:
        """Everything a continuation needs, in MoCo's format.

        Raises:
            UserError: a weight is not finite, which no later step would mend.
        """
        norms = torch._foreach_norm([p.detach() for p in self.encoder.parameters()])
        if not torch.stack(norms).isfinite().all():
            raise UserError(
                f"weights are not finite after step {step}; nothing was saved; lower SOLVER.BASE_LR, raise "
                "SOLVER.WARMUP_EPOCHS or set SOLVER.AMP none"
            )
        random_states = {"torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "epoch": step // steps_per_epoch, "arch": cfg.MODEL.ARCH, "state_dict": self.siamese.moco_state_dict(),
            "optimizer": self.optimizer.state_dict(), "step": step, "steps_per_epoch": steps_per_epoch,
            "scaler": self.scaler.state_dict(), "random_states": random_states, "method": cfg.METHOD.NAME,
            "bn_groups": self.bn_groups, "skipped_steps": self.skipped_steps, "config": dump(cfg),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> int:
        """Restores `state`; returns the step to go on from.

        Raises:
            UserError: the checkpoint is of another model.
        """
        try:
            self.siamese.load_moco_state_dict(state["state_dict"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            torch.set_rng_state(state["random_states"]["torch"])
            if self.device.type == "cuda" and "cuda" in state["random_states"]:
                torch.cuda.set_rng_state(state["random_states"]["cuda"], self.device)
            step = int(state["step"])
        except KeyError as error:
            raise UserError(f"the checkpoint lacks {error}, so no run can go on from it; {_OTHER_FOLDER}") from error
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"the checkpoint does not fit this config: {reason}; {_OTHER_FOLDER}") from error
        self.skipped_steps = int(state.get("skipped_steps", 0))
        earlier = state.get("bn_groups", self.bn_groups)
        if earlier != self.bn_groups:
            self.say(
                f"warning: begun with batch-norm statistics over {earlier} parts of the batch, now {self.bn_groups} "
                "(another number of processes): the result will not be the uninterrupted run's"
            )
        return step

    def digest(self) -> str:
        """16 hexadecimal digits that change with any weight, statistic or negative."""
        joined = "".join(tensor_digest(tensor) for tensor in self.siamese.state_dict().values())
        return hashlib.sha256(joined.encode()).hexdigest()[:16]


def local_bn_groups(cfg: CfgNode, say=lambda _: None) -> list[int]:
    """Images in each part of this rank's batch that has BN statistics of its own.

    MODEL.BN_GROUPS contiguous parts of the global batch lie on the ranks, whose slices end where parts end; the parts
    are therefore the same on any number of processes.
    """
    ranks, wanted, total = distributed.world_size(), cfg.MODEL.BN_GROUPS, cfg.SOLVER.IMS_PER_BATCH
    if total < ranks:
        raise UserError(f"SOLVER.IMS_PER_BATCH is {total}, fewer images than the {ranks} processes; raise it")
    in_batch = METHODS[cfg.METHOD.NAME].kind == "batch"  # every view goes through one encoder: nothing to hide
    if wanted == 1 and not in_batch:
        say("MODEL.BN_GROUPS is 1: query and keys share BN statistics, which can leak the answer (MoCo, Sec. 3.3)")
    if wanted > 1 and (wanted % ranks or wanted > total):
        raise UserError(
            f"MODEL.BN_GROUPS is {wanted}; it must be a multiple of {ranks} processes and at most {total} images"
        )
    groups = max(ranks, wanted)
    if wanted == 0 and ranks == 1 and not in_batch:
        groups = min(8, max(1, total // 2), max(2, total // 32))
        say(f"one process: split BN with {groups} groups stands in for ShuffleBN (MODEL.BN_GROUPS {groups})")
    first, count = distributed.rank() * groups // ranks, groups // ranks
    bounds = [distributed.slice_bounds(total, group, groups) for group in range(first, first + count)]
    return [stop - start for start, stop in bounds]


def _start_from(encoder: nn.Module, cfg: CfgNode) -> None:
    source = load_backbone(cfg.MODEL.WEIGHTS)
    if (source.arch, source.stem) != (cfg.MODEL.ARCH, cfg.MODEL.STEM):
        raise UserError(
            f"MODEL.WEIGHTS holds a {source.arch} with {source.stem} stem, but MODEL.ARCH is {cfg.MODEL.ARCH} and "
            f"MODEL.STEM {cfg.MODEL.STEM}"
        )
    encoder.load_state_dict(source.state_dict, strict=False)  # the head alone is missing: load_backbone is strict


def _leaf(cfg: CfgNode, dotted: str) -> Any:
    for part in dotted.split("."):
        cfg = cfg[part]
    return cfg
