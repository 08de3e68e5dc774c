"""Measures what the fast forms win, each against the naive form of the same thing in the same process.

python tools/benchmark.py objectives --queries 64 --negatives 65536
python tools/benchmark.py views --views 6 --json views.json
python tools/benchmark.py detection --config-file configs/coco_mask_R50_FPN_1x_random.yaml
python tools/benchmark.py trainer --config-file configs/demo_mask_R18_FPN_digits.yaml
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory, is to keep quiet

import cv2
import numpy as np
import torch
from PIL import Image, ImageFilter
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.profiler import ProfilerActivity, profile
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tools`, when run as a file

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.image_io import decode
from pretrain.common.run_folder import write_json
from pretrain.loader import stream
from pretrain.methods import METHODS
from pretrain.views import RECIPES, crop_views, make_views
from tools.benchmarks.detection import add_detection

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs one benchmark."""
    parser = argparse.ArgumentParser(prog="benchmark.py", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    _add_objectives(commands)
    _add_views(commands)
    add_detection(commands)
    args = parser.parse_args(argv)
    args.run(args)
    return 0


def interleaved_seconds(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each form, all of them once a round, so that a slow moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def peak_mib(form: Callable[[], object], device: torch.device) -> float:
    """MiB of tensors that a form holds at once, above what is held before it: torch's own count, without noise."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        form()
        return (torch.cuda.max_memory_allocated(device) - before) / _MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        form()
    events = cast(Any, record.profiler).kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0)) / _MIB


# --- objectives ---
# The naive forms: the equations with one row of K + 1 logits a query. Shape letters as in pretrain/methods/common.py.


def _logits(q_ND: Tensor, key_ND: Tensor, queue_DK: Tensor, temperature: float) -> Tensor:
    return torch.cat([(q_ND * key_ND).sum(dim=1, keepdim=True), q_ND @ queue_DK], dim=1) / temperature


def naive_moco(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float) -> Tensor:
    logits = _logits(q_ND, keys_MND[0], queue_DK, temperature)
    return cross_entropy(logits, torch.zeros(len(q_ND), dtype=torch.long, device=q_ND.device))


def naive_multikey(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float) -> Tensor:
    losses = [naive_moco(q_ND, key_ND[None], queue_DK, temperature=temperature) for key_ND in keys_MND]
    return torch.stack(losses).mean()


def naive_jcl(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, lambda_: float) -> Tensor:
    mean_ND = keys_MND.mean(dim=0)
    centred_MND = keys_MND - mean_ND
    covariance_NDD = torch.einsum("mnd,mne->nde", centred_MND, centred_MND) / len(keys_MND)
    logits = _logits(q_ND, mean_ND, queue_DK, temperature)
    bonus = lambda_ / (2 * temperature**2) * torch.einsum("nd,nde,ne->n", q_ND, covariance_NDD, q_ND)
    positive = logits[:, 0]
    logits = torch.cat([(positive + bonus)[:, None], logits[:, 1:]], dim=1)
    return (logits.logsumexp(dim=1) - positive).mean()


def naive_sce(
    q_ND: Tensor,
    keys_MND: Tensor,
    queue_DK: Tensor,
    *,
    temperature: float,
    key_temperature: float,
    lambda_: float,
    mask_positive: bool,
) -> Tensor:
    slot = torch.full((len(q_ND), 1), -torch.inf if mask_positive else 0.0, device=q_ND.device)
    target = torch.cat([slot, keys_MND[0] @ queue_DK], dim=1).div(key_temperature).softmax(dim=1) * (1 - lambda_)
    target[:, 0] += lambda_
    return cross_entropy(_logits(q_ND, keys_MND[0], queue_DK, temperature), target)


def naive_ressl(
    q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor, *, temperature: float, key_temperature: float
) -> Tensor:
    return cross_entropy(q_ND @ queue_DK / temperature, (keys_MND[0] @ queue_DK / key_temperature).softmax(dim=1))


NAIVE = {
    "mocov2": naive_moco,
    "multikey": naive_multikey,
    "jcl": naive_jcl,
    "sce": naive_sce,
    "ressl": naive_ressl,
}
_VALUES = {"temperature": 0.2, "key_temperature": 0.05, "lambda_": 0.5, "mask_positive": False}


def _add_objectives(commands) -> None:
    command = commands.add_parser(
        "objectives", help="losses of queue objectives, forward and backward, time and memory"
    )
    command.add_argument("--queries", type=int, default=64, help="N, on one device")
    command.add_argument("--keys", type=int, default=5, help="M', for the objectives that take many")
    command.add_argument("--dims", type=int, default=128, help="D")
    command.add_argument("--negatives", type=int, default=65536, help="K")
    command.add_argument("--rounds", type=int, default=15, help="timed rounds; the median is printed")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.set_defaults(run=objectives)


def objectives(args: argparse.Namespace) -> None:
    """Prints, for each objective, median time and peak memory of both forms and their ratios.

    Raises:
        UserError: a size below 1.
        RuntimeError: the two forms' losses or gradients differ, so that a comparison would mean nothing.
    """
    for name in ("queries", "keys", "dims", "negatives", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    torch.manual_seed(0)
    device = torch.device(args.device)
    q_ND = normalize(torch.randn(args.queries, args.dims, device=device), dim=1).requires_grad_()
    keys_MND = normalize(q_ND.detach() + 0.5 * torch.randn(args.keys, args.queries, args.dims, device=device), dim=2)
    queue_DK = normalize(torch.randn(args.dims, args.negatives, device=device), dim=0)
    sizes = f"N {args.queries}, M' {args.keys}, D {args.dims}, K {args.negatives}"
    print(f"{sizes}, {device}, {torch.get_num_threads()} CPU thread(s)")
    print(f"{'objective':10} {'ms':>8} {'naive ms':>9} {'faster':>7} {'MiB':>8} {'naive MiB':>10} {'smaller':>8}")
    for name, naive in NAIVE.items():
        method = METHODS[name]
        keys = keys_MND if method.many_keys else keys_MND[:1]
        hyper = {keyword: _VALUES[keyword] for keyword in method.hyper if keyword in _VALUES}

        def fast_form(method=method, keys=keys, hyper=hyper) -> tuple[Tensor, Tensor]:
            loss = method.objective(q_ND, keys, queue_DK, **hyper).loss
            return loss.detach(), torch.autograd.grad(loss, q_ND)[0]

        def naive_form(naive=naive, keys=keys, hyper=hyper) -> tuple[Tensor, Tensor]:
            loss = naive(q_ND, keys, queue_DK, **hyper)
            return loss.detach(), torch.autograd.grad(loss, q_ND)[0]

        forms = {"fast": fast_form, "naive": naive_form}
        for one, other in zip(fast_form(), naive_form(), strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
                raise RuntimeError(f"{name}: the fast and the naive form differ by {(one - other).abs().max():.2g}")
        memory = {form: peak_mib(run, device) for form, run in forms.items()}
        seconds = interleaved_seconds(forms, args.rounds)
        print(_row(name, seconds, memory))


def _row(name: str, seconds: dict[str, float], memory: dict[str, float]) -> str:
    fast, naive = seconds["fast"] * 1e3, seconds["naive"] * 1e3
    row = f"{name:10} {fast:8.2f} {naive:9.2f} {naive / fast:6.2f}x"
    small, large = memory["fast"], memory["naive"]
    ratio = f"{large / small:.1f}x" if small > 0 else "-"
    return row + f" {small:8.1f} {large:10.1f} {ratio:>8}"


# --- views ---


def _add_views(commands) -> None:
    command = commands.add_parser("views", help="MoCo v2 views of a 500 x 375 JPEG on one core, against PIL transforms")
    command.add_argument("--views", type=int, default=6, help="views an image (M' + 1)")
    command.add_argument("--size", type=int, default=224, help="pixels a side of a view")
    command.add_argument("--rounds", type=int, default=30, help="timed rounds; the median is printed")
    command.add_argument("--json", default="", help="also write the numbers to this file")
    command.set_defaults(run=benchmark_views)


def benchmark_views(args: argparse.Namespace) -> None:
    """Prints the median milliseconds an image of each way to its views, decoding included, and the ratios to ours.

    Raises:
        UserError: a size below 1.
    """
    for name in ("views", "size", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    cv2.setNumThreads(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    photo = Image.fromarray(load_sample_image("china.jpg")).resize((500, 375), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=90)
    jpeg = buffer.getvalue()
    moco_v2 = [RECIPES["moco_v2"]] * args.views
    counter = itertools.count()

    def streams() -> Callable[[int], np.random.Generator]:
        image = next(counter)
        return lambda view: stream(0, 0, 0, image, view)

    def pil() -> list[np.ndarray]:
        image = Image.open(io.BytesIO(jpeg)).convert("RGB")
        return [np.asarray(_pil_moco_v2(image, args.size)) for _ in range(args.views)]

    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: make_views(decode(jpeg, "photo"), moco_v2, args.size, streams()),
        "ours, colours left to the device": lambda: crop_views(decode(jpeg, "photo"), moco_v2, args.size, streams()),
        "ours, decoding alone": lambda: decode(jpeg, "photo"),
        "PIL (torchvision's transforms, Pillow's blur)": pil,
    }
    try:
        milliseconds = {name: 1e3 * s for name, s in interleaved_seconds(forms, args.rounds).items()}
    finally:
        torch.set_num_threads(threads)
    print(f"{args.views} views of {args.size} x {args.size}, one core, milliseconds an image and the ratio to ours")
    for name, value in milliseconds.items():
        print(f"{name:46} {value:8.2f} {value / milliseconds['ours']:6.2f}x")
    if args.json:
        write_json(args.json, {"views": args.views, "size": args.size, "milliseconds": milliseconds})


def _pil_moco_v2(image: Image.Image, size: int) -> Image.Image:
    """The same recipe as it is written with torchvision, and with Pillow's blur as in MoCo's release."""
    colours = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)
    blur = transforms.RandomApply([lambda x: x.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))], 0.5)
    flip = transforms.RandomHorizontalFlip()
    for step in (transforms.RandomResizedCrop(size, (0.2, 1.0)), colours, transforms.RandomGrayscale(0.2), blur, flip):
        image = step(image)
    return image


if __name__ == "__main__":
    run_command_line(main)
