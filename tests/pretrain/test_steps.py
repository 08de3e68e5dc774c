"""A step of each objective gives the same numbers on one process and on several with the same BN groups."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from pretrain.common import distributed
from pretrain.config import load_config
from pretrain.data.loader import Batch
from pretrain.methods import METHODS
from pretrain.model import objectives
from pretrain.steps import training_step
from tests.errors import refused
from tests.pretrain.ranks import call_on_ranks
from tests.pretrain.runs import build_state

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
N = 8  # images
V = 4  # views
DENSE = ("METHOD.DENSE_WEIGHT", "0.5")


def config(method: str, *more: str):
    words = (
        f"METHOD.NAME {method} MODEL.ARCH resnet18 MODEL.STEM cifar MODEL.HEAD_HIDDEN_DIMS [32] MODEL.EMBEDDING_DIM 16 "
        f"SOLVER.IMS_PER_BATCH {N} SOLVER.BASE_LR 0.1 SOLVER.EPOCHS 2 MODEL.BN_GROUPS 2 DEVICE cpu"
    )
    if method in ("jcl", "multikey"):
        words += f" METHOD.NUM_KEYS {V - 1}"
    if METHODS[method].kind == "queue":
        words += " MODEL.QUEUE_SIZE 20 MODEL.EMA_MOMENTUM 0.9"
    return load_config(None, [*words.split(), *more])


def batch_of(num_views: int, seed: int = 1, rows: slice = slice(N), labels=lambda index: index % 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(rows.stop)[rows]
    images = torch.randint(0, 256, (num_views, rows.stop, 3, 16, 16), generator=generator).to(torch.uint8)
    return Batch(images[:, rows], index, labels(index), {})


def _two_steps(method: str, *more: str) -> dict[str, torch.Tensor]:
    """Return the mean loss of two steps, the gradients of the first one, and the model's state at the end."""
    cfg = config(method, *more)
    run = build_state(cfg)
    total = cfg.SOLVER.IMS_PER_BATCH
    rows = distributed.rank_slice(total)
    out = {}
    for step in range(2):
        whole = batch_of(1 + cfg.METHOD.NUM_KEYS, step, slice(total))
        batch = Batch(whole.views_VnCHW[:, rows], whole.index_n[rows], whole.label_n[rows], {})
        loss, _ = training_step(run, batch, step)
        out[f"loss{step}"] = distributed.mean_(loss)
        if step == 0:
            gradients: dict[str, Any] = {name: p.grad for name, p in run.objective.encoder.network.named_parameters()}
            out |= {f"grad.{name}": gradient.clone() for name, gradient in gradients.items()}
    return out | {f"end.{name}": value.clone() for name, value in run.objective.model.state_dict().items()}


def _on_ranks(folder: Path, cases: list[tuple[str, ...]]) -> None:
    for number, case in enumerate(cases):
        values = _two_steps(*case)
        if distributed.is_first_rank():
            torch.save(values, folder / f"{number}.pth")


def _assert_same_steps(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], case: tuple[str, ...], in_parts: bool = False
) -> None:
    """Assert equal values. With micro-batches, running statistics differ and are not compared."""
    if in_parts:
        first = {name: value for name, value in first.items() if "running_" not in name and "num_batches" not in name}
    else:
        assert first.keys() == second.keys()
    assert (first["loss0"] - second["loss0"]).abs() < 1e-5
    largest = max(value.abs().max() for name, value in first.items() if name.startswith("grad."))
    for name, value in first.items():
        difference = (value - second[name]).abs().max()
        if name.startswith("grad."):
            assert difference < 1e-5 * largest, (case, name)
        elif name.endswith(("queue_ptr", "num_batches_tracked")):
            assert difference == 0, (case, name)
        else:  # after two steps at a high learning rate rounding has grown
            assert difference < 1e-2 * value.abs().max().clamp(min=1), (case, name)


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("mocov2",), ("jcl", *DENSE, "METHOD.DENSE_WARMUP_STEPS", "1"), ("simclr",), ("supcon",)]),
        (4, [("jcl", *DENSE, "MODEL.BN_GROUPS", "8", "SOLVER.IMS_PER_BATCH", "24")]),
        (2, [(*case, "SOLVER.IMS_PER_BATCH", "16", "MODEL.BN_GROUPS", "4") for case in (("jcl",), ("simclr",))]),
    ],
)
def test_several_processes_equal_one_with_the_same_bn_groups(ranks, cases, tmp_path):
    """The last cases divide each process's batch into two micro-batches, too."""
    more = ("SOLVER.ACCUMULATE", "2") if "4" in cases[0] else ()
    call_on_ranks(_on_ranks, ranks, tmp_path, [(*case, *more) for case in cases])
    for number, case in enumerate(cases):
        _assert_same_steps(_two_steps(*case), torch.load(tmp_path / f"{number}.pth"), case, bool(more))


@pytest.mark.parametrize("method", [("mocov2",), ("jcl",), ("jcl", *DENSE), ("sce",), ("simclr",), ("tcl",)])
def test_micro_batches_give_the_gradients_of_the_whole_batch(method):
    """Without BN_GROUPS, one process with 4 micro-batches equals 4 processes."""
    case = (*method, "SOLVER.IMS_PER_BATCH", "12", "MODEL.BN_GROUPS")
    whole = _two_steps(*case, "4")
    for groups, parts in (("4", "2"), ("4", "4"), ("0", "4")):
        _assert_same_steps(whole, _two_steps(*case, groups, "SOLVER.ACCUMULATE", parts), case, True)


@pytest.mark.parametrize("method", ["jcl", "simclr"])
def test_an_encoder_processes_one_micro_batch_at_a_time(method):
    run = build_state(config(method, "SOLVER.ACCUMULATE", "2"))
    seen: list[int] = []
    for encoder in run.objective.model.children():
        encoder.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    training_step(run, batch_of(2), 0)
    assert set(seen) == {N // 2 if method == "jcl" else N}  # of N / 2 images, SimCLR's encoder takes both views


@pytest.mark.parametrize(("groups", "images"), [("8", "8 in 8 BN groups"), ("4", "")])
def test_batch_norm_of_one_image_per_group_is_refused(groups, images):
    state = build_state(config("mocov2", "MODEL.BN_GROUPS", groups, "MODEL.HEAD_BN", "True"))
    if images:
        refused(lambda: training_step(state, batch_of(2), 0), "one image", images, "MODEL.BN_GROUPS")
    else:
        training_step(state, batch_of(2), 0)


def _loss(method: str, batch: Batch, *more: str) -> float:
    return float(training_step(build_state(config(method, *more)), batch, 0)[0])


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_is_near_full_precision(amp, monkeypatch):
    batch = batch_of(V)
    full = _loss("jcl", batch)
    mixed = _loss("jcl", batch, "SOLVER.AMP", amp)
    monkeypatch.setattr(objectives, "choose_memory_format", lambda *_: torch.channels_last)
    on_gpus = build_state(config("jcl", "SOLVER.AMP", amp))
    assert on_gpus.objective.encoder.network.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert float(training_step(on_gpus, batch, 0)[0]) == pytest.approx(mixed, rel=0.01)
    assert mixed == pytest.approx(full, rel=0.05) and mixed != full


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_compiled_run_has_one_graph_per_encoder_and_the_losses_of_one_that_is_not(monkeypatch, backend):
    """Dynamo guards on the attributes of an encoder's modules; above 8 graphs, it would leave the rest uncompiled.

    The default backend, inductor, compiles C++, which takes minutes.
    """
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=backend))
    monkeypatch.setenv("TORCH_WARM_POOL", "0")  # no processes for Triton's kernels
    counters.clear()
    micro_batches = ("SOLVER.ACCUMULATE", "8", "MODEL.BN_GROUPS", "8", "SOLVER.IMS_PER_BATCH", "16")
    losses = []
    for words in ((), ("SOLVER.COMPILE", "True")):
        state = build_state(config("jcl", *micro_batches, *words))
        losses.append([float(training_step(state, batch_of(V, rows=slice(16)), step)[0]) for step in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 2


def test_an_unlabeled_image_has_only_its_own_views_as_positives():
    batch = batch_of(2, labels=lambda index: torch.full_like(index, -1))
    assert _loss("supcon", batch, "METHOD.LABELS", "class") == _loss("supcon", batch, "METHOD.LABELS", "index")


def test_jcls_lambda_rises_where_its_schedule_is_linear():
    """In the first of 2 epochs of 4 steps, lambda is half its final value."""
    for step, constant in ((3, "4.0"), (4, "8.0")):
        rising = build_state(config("jcl", "METHOD.LAMBDA_SCHEDULE", "linear", "METHOD.JCL_LAMBDA", "8.0"))
        other = build_state(config("jcl", "METHOD.JCL_LAMBDA", constant))
        results = [training_step(run, batch_of(V), step)[0] for run in (rising, other)]
        assert torch.equal(*results)


def test_sync_bn_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    refused(lambda: build_state(config("simclr", "MODEL.BN_GROUPS", "1")), "MODEL.BN_GROUPS is 1", "GPUs only")
