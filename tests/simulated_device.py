"""A device that is not the CPU, simulated on the CPU: what would fail or wait on a GPU is found without one.

Its tensors hold their numbers on the CPU, but call themselves tensors of the device "sim". As with CUDA, an operation
on tensors of both devices is an error, and so is reading one without copying it. Each operation that would make the
host wait for the device is counted at the line that asked for it. Kernels, streams, half precision and nccl are not
simulated.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision  # noqa: F401  (its operators)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {  # the indexed tensor's device decides; indices may come from the CPU
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_WAITS = {  # the size or the value of what they return must reach the host
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.equal.default,
    torch.ops.torchvision.nms.default,
}
_ROOT = Path(__file__).parents[1]


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device; `host` has its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        device: Any = "sim:0"
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, layout=host.layout, device=device
        )
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"{self.host!r} on sim"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy; copy it to the CPU first")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)


class SimulatedDevice(TorchDispatchMode):
    """While active, device "sim" exists. `waits` counts (what, file:line) of everything the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()

    def __enter__(self) -> SimulatedDevice:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="sim") then copies where we see it
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.waits)


def register() -> None:
    """Names the device; once per process, and permanently."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    _setup_privateuseone_for_python_backend("sim", backend_module=Backend())


def _run(func: Any, args: Any, kwargs: dict[str, Any], waits: collections.Counter | None) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    inputs = [x for x in flat if isinstance(x, DeviceTensor)]
    others = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor)]
    wanted = kwargs.get("device")
    if not inputs and (wanted is None or torch.device(wanted).type != "sim"):
        return func(*args, **kwargs)
    if func not in _COPIES:
        loose = [x for x in others if x.ndim > 0]
        if func in _INDEXED and isinstance(args[0], DeviceTensor):
            loose = [x for x in loose if x.dtype not in (torch.long, torch.bool, torch.uint8)]
        if loose and inputs:
            raise RuntimeError(
                f"{func}: expected all tensors on the same device, found {tuple(inputs[0].shape)} on sim and "
                f"{tuple(loose[0].shape)} on cpu"
            )
    if waits is not None and (reason := _wait(func, args, kwargs, others)):
        waits[reason, _caller()] += 1
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    host_args, host_kwargs = tree_map_only(DeviceTensor, lambda x: x.host, (args, kwargs))
    found = func(*host_args, **host_kwargs)
    if torch.Tag.inplace_view in func.tags:  # unsqueeze_ and its like change the shape, so the outer tensor's too
        with no_dispatch():
            func(*args, **kwargs)
    if wanted is not None and torch.device(wanted).type != "sim":
        return found
    same = {id(x.host): x for x in inputs}
    if isinstance(args[0] if args else None, torch.Tensor) and not isinstance(args[0], DeviceTensor) and wanted is None:
        return args[0] if found is args[0] else tree_map_only(torch.Tensor, DeviceTensor, found)
    return tree_map_only(torch.Tensor, lambda x: same[id(x)] if id(x) in same else DeviceTensor(x), found)


def _wait(func: Any, args: Any, kwargs: dict[str, Any], others: Sequence[torch.Tensor]) -> str:
    """Why the host would wait for the device, or nothing."""
    if func in _WAITS:
        return str(func)
    if func is aten.copy_.default:
        from_device, to_device = isinstance(args[1], DeviceTensor), isinstance(args[0], DeviceTensor)
        return "copy between devices" if from_device != to_device and not _non_blocking(args, kwargs, 2) else ""
    if func is aten._to_copy.default and kwargs.get("device") is not None:
        crosses = isinstance(args[0], DeviceTensor) != (torch.device(kwargs["device"]).type == "sim")
        return "copy between devices" if crosses and not kwargs.get("non_blocking") else ""
    if func in _INDEXED:
        indices = [x for x in args[1] if x is not None]
        filled = func is not aten.index.Tensor and args[2].numel() == 1  # x[mask] = 0 is masked_fill
        if not filled and any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            return "index by a mask"
        if any(not isinstance(x, DeviceTensor) and x.numel() for x in indices):
            return "index from the CPU"
    return ""


def _non_blocking(args: Any, kwargs: dict[str, Any], place: int) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("non_blocking"))


def _caller() -> str:
    """The innermost line of this project, its libraries aside."""
    frame = sys._getframe(2)
    while frame:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
