"""The linear probe: a classifier on frozen features, with its own run folder and exact resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checkpoint, distributed, schedule, views
from ..common import interrupt
from ..common.config_io import dump, flatten
from ..common.copies import OnItsWay
from ..common.errors import UserError
from ..common.run_folder import MetricsWriter, atomic_write, setup_logging, write_environment, write_json
from ..encoder import feature_dim, pooled_features
from ..loader import Loader
from ..progress import Progress
from .features import Features, autocast, extract, load_frozen, probe_data


def main(cfg: CfgNode, weights: str) -> dict[str, Any]:
    """Trains LINEAR.* heads on the frozen backbone of ``weights`` and returns what stands in results.json.

    With LINEAR.LRS several heads learn side by side from one pass over the data, one a learning rate; one that diverges
    scores 0 and leaves the others alone. With LINEAR.AUGMENT none every feature is computed once.

    Raises:
        UserError: bad input, every head diverged, the folder holds a probe of another protocol or backbone.
        interrupt.Stopped: asked to stop; the checkpoint is written.
    """
    output_dir = Path(cfg.OUTPUT_DIR or "runs/linear")
    device = distributed.init(cfg.DEVICE)
    log = setup_logging(output_dir, distributed.rank())
    backbone, source = load_frozen(weights, cfg, device)
    work = _work(cfg, source)
    if (output_dir / "results.json").is_file():
        results = json.loads((output_dir / "results.json").read_text())
        _check_same(results.get("work", work), work, output_dir)
        log.info(f"{output_dir} is complete; nothing to do")
        return results
    data = probe_data(cfg)
    torch.manual_seed(cfg.SEED)
    heads = Heads(feature_dim(backbone), len(data.train.classes), cfg).to(device)
    val = extract(backbone, data.val, cfg, device)
    stream = _Cached(extract(backbone, data.train, cfg, device), cfg) if cfg.LINEAR.AUGMENT == "none" else _Augmented(
        backbone, data.train, cfg, device)  # fmt: skip
    found = checkpoint.newest(output_dir, warn=log.warning)
    if found:
        _check_same(found[1].get("work", work), work, output_dir)
    first = heads.load(found[1]) if found else 0
    if distributed.is_main():
        atomic_write(output_dir / "config.yaml", dump(cfg))
        write_environment(output_dir)
        metrics = MetricsWriter(output_dir, first * len(stream))
    score: dict[str, Any] = heads.score(val)
    progress = Progress(
        cfg.LINEAR.EPOCHS * len(stream),
        first * len(stream),
        cfg.LINEAR.IMS_PER_BATCH,
        log,
        distributed.is_main(),
        "linear",
    )
    for epoch in range(first, cfg.LINEAR.EPOCHS):
        factor = heads.set_rates(epoch)
        losses = torch.zeros(len(heads.rates), device=device)
        waiting = time.perf_counter()
        for features, labels in stream.epoch(epoch):
            progress.waited(time.perf_counter() - waiting)
            losses += heads.step(features, labels)
            progress.advance()
            if heads.stop:
                raise interrupt.Stopped(f"{heads.stop}: {epoch} whole epochs are in {output_dir}")
            waiting = time.perf_counter()
        heads.retire(losses, epoch, log.warning)
        score = heads.score(val)
        best = _best(score)
        if distributed.is_main():
            loss = float(losses[heads.rates.index(best["learning_rate"])]) / len(stream)
            metrics.write((epoch + 1) * len(stream) - 1, {"loss": loss, "lr_factor": factor, **best})
            progress.report(f"epoch {epoch + 1}  top-1 {best['top1']:.2f}", progress.rates())
            saved = checkpoint.path_of_step(output_dir, epoch + 1)
            checkpoint.save(saved, {**heads.state(epoch + 1), "work": work})
            checkpoint.prune(output_dir, 1, saved)
        distributed.barrier()
    progress.close()
    results = {"stage": "linear", "source": source, "metrics": _best(score), "per_learning_rate": score,
               "protocol": {key: cfg.LINEAR[key] for key in sorted(cfg.LINEAR)}, "work": work}  # fmt: skip
    if distributed.is_main():
        metrics.close()
        write_json(output_dir / "results.json", results)
        log.info(f"linear top-1 {results['metrics']['top1']:.2f}, top-5 {results['metrics']['top5']:.2f}")
    distributed.barrier()
    return results


class Heads(nn.Module):
    """Linear classifiers side by side, one a learning rate; SGD, gradients averaged over ranks."""

    def __init__(self, features: int, classes: int, cfg: CfgNode) -> None:
        super().__init__()
        self.cfg = cfg.LINEAR
        self.stop = ""  # why to stop after this step, if so; the same on every rank
        self._wish: OnItsWay | None = None  # of the step before: above 0 where a rank was asked to stop
        self.diverged: list[float] = []
        self.rates = [float(lr) for lr in cfg.LINEAR.LRS] or [cfg.LINEAR.BASE_LR]
        heads = [nn.Linear(features, classes) for _ in self.rates]
        for head in heads:  # as MoCo's protocol starts it
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)
        self.heads = nn.ModuleList(heads)
        groups = [{"params": list(h.parameters()), "lr": lr} for h, lr in zip(self.heads, self.rates, strict=True)]
        self.optimizer = torch.optim.SGD(groups, momentum=cfg.LINEAR.MOMENTUM, weight_decay=cfg.LINEAR.WEIGHT_DECAY)

    def set_rates(self, epoch: int) -> float:
        factor = schedule.learning_rate(
            epoch,
            1,
            self.cfg.EPOCHS,
            base_lr=1.0,
            kind=self.cfg.LR_SCHEDULE,
            milestones=self.cfg.STEPS,
            gamma=self.cfg.GAMMA,
        )
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        return factor

    def step(self, features_nF: Tensor, labels_n: Tensor) -> Tensor:
        """One optimiser step on this rank's share; returns each head's mean loss (this rank's)."""
        total, ranks = self.cfg.IMS_PER_BATCH, distributed.world_size()
        losses = [F.cross_entropy(head(features_nF), labels_n) for head in self.heads]
        self.optimizer.zero_grad(set_to_none=True)
        (torch.stack(losses).sum() * (len(labels_n) * ranks / total)).backward()
        self.stop = interrupt.stop_requested()
        if ranks > 1:  # one collective carries the gradients and the wish to stop, so that all ranks agree on it
            grads = [p.grad for p in self.heads.parameters() if p.grad is not None]
            wish = grads[0].new_tensor([float(bool(self.stop))])
            flat = distributed.mean_(torch.cat([wish, *(g.flatten() for g in grads)]))
            parts = flat[1:].split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
            known, self._wish = self._wish, OnItsWay(flat[:1])
            # Of the step before: waiting for this one's would leave the device without work.
            agreed = known is not None and known.read().item() > 0
            self.stop = (self.stop or "another rank was asked to stop") if agreed else ""
        self.optimizer.step()
        return torch.stack(losses).detach()

    def retire(self, losses_H: Tensor, epoch: int, say: Callable[[str], None]) -> None:
        """Zeroes the heads whose loss or weights were not finite in this epoch, on every rank alike.

        Raises:
            UserError: no head is left.
        """
        norms = torch.stack([next(head.parameters()).detach().norm() for head in self.heads])
        finite = distributed.mean_((losses_H.isfinite() & norms.isfinite()).float()) == 1
        for head, rate, good in zip(self.heads, self.rates, finite.tolist(), strict=True):
            if not good and rate not in self.diverged:
                self.diverged.append(rate)
                say(f"the head of learning rate {rate:g} diverged in epoch {epoch}; it scores 0")
            if not good:
                for parameter in head.parameters():
                    nn.init.zeros_(parameter)
                    self.optimizer.state.pop(parameter, None)
        if len(self.diverged) == len(self.rates):
            raise UserError(
                f"the linear probe's loss is not finite in epoch {epoch}; lower LINEAR.BASE_LR or LINEAR.LRS"
            )

    @torch.no_grad()
    def score(self, val: Features) -> dict[str, dict[str, float]]:
        """Top-1 and top-5 (0 to 100) of every head, by its learning rate."""
        top = min(5, val.num_classes)
        scores = {}
        for head, rate in zip(self.heads, self.rates, strict=True):
            if rate in self.diverged:
                scores[f"{rate:g}"] = {"top1": 0.0, "top5": 0.0, "diverged": True}
                continue
            ranked = torch.cat([head(part).topk(top).indices for part in val.features_NF.split(4096)])
            right = (ranked == val.labels_N[:, None]).float()
            scores[f"{rate:g}"] = {"top1": 100 * float(right[:, 0].mean()), "top5": 100 * float(right.sum(1).mean())}
        return scores

    def state(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "state_dict": self.heads.state_dict(), "optimizer": self.optimizer.state_dict(),
                "diverged": self.diverged}  # fmt: skip

    def load(self, state: dict[str, Any]) -> int:
        self.heads.load_state_dict(state["state_dict"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.diverged = list(state.get("diverged", []))
        return int(state["epoch"])


class _Augmented:
    """Batches of (features, labels) from augmented images."""

    def __init__(self, backbone, data, cfg: CfgNode, device: torch.device) -> None:
        self.backbone, self.device, self.amp = backbone, device, cfg.SOLVER.AMP
        self.loader = Loader(
            data, [views.RECIPES[cfg.LINEAR.AUGMENT]], cfg.PROBE.IMAGE_SIZE or cfg.VIEWS.IMAGE_SIZE,
            batch_size=cfg.LINEAR.IMS_PER_BATCH, seed=cfg.SEED, rank=distributed.rank(),
            world_size=distributed.world_size(), num_workers=cfg.DATALOADER.NUM_WORKERS,
            on_corrupt=cfg.DATALOADER.ON_CORRUPT, pin_memory=device.type == "cuda",
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int):
        for batch in self.loader.epoch(epoch):
            images = views.normalize(batch.views_VNCHW[0].to(self.device, non_blocking=True))
            with torch.no_grad(), autocast(self.amp, self.device):
                features = pooled_features(self.backbone, images).float()
            yield features, batch.label_N.to(self.device, non_blocking=True)


class _Cached:
    """Batches of (features, labels) from features computed once; the order is a function of (seed, epoch)."""

    def __init__(self, features: Features, cfg: CfgNode) -> None:
        self.features, self.total, self.seed = features, cfg.LINEAR.IMS_PER_BATCH, cfg.SEED
        if len(features.labels_N) < self.total:
            raise UserError(
                f"LINEAR.IMS_PER_BATCH is {self.total}, above the {len(features.labels_N)} labelled images; lower it"
            )

    def __len__(self) -> int:
        return len(self.features.labels_N) // self.total

    def epoch(self, epoch: int):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.features.labels_N), generator=generator).to(self.features.labels_N.device)
        start, stop = distributed.slice_bounds(self.total, distributed.rank(), distributed.world_size())
        for step in range(len(self)):
            mine = order[step * self.total + start : step * self.total + stop]
            yield self.features.features_NF[mine], self.features.labels_N[mine]


def _work(cfg: CfgNode, source: dict[str, Any]) -> dict[str, str]:
    """What the result depends on: protocol, data, seed, and the backbone by its hash or seed."""
    names = ("LINEAR.", "PROBE.IMAGE_SIZE", "PROBE.RESIZE", "DATA.TRAIN", "DATA.VAL", "DATA.PROBE_TRAIN", "SEED")
    kept = [f"{key} {value!r}" for key, value in flatten(cfg) if key.startswith(names)]
    backbone = str(source.get("source_sha256") or source)
    return {"config": "; ".join(kept), "backbone": backbone}


def _check_same(earlier: dict[str, str], now: dict[str, str], output_dir: Path) -> None:
    """Refuses to go on with, or to report, a probe of something else."""
    if earlier["backbone"] != now["backbone"]:
        raise UserError(f"{output_dir} holds a probe of another backbone; choose another OUTPUT_DIR")
    before, after = (set(work["config"].split("; ")) for work in (earlier, now))
    if before != after:
        changed = "; ".join([*sorted(before - after), "now", *sorted(after - before)])
        raise UserError(f"{output_dir} holds a probe of another protocol ({changed}); choose another OUTPUT_DIR")


def _best(scores: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The head with the highest top-1, with its learning rate."""
    rate = max(scores, key=lambda r: scores[r]["top1"])
    return {**scores[rate], "learning_rate": float(rate)}
