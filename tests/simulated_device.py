"""A device that is not the CPU, simulated on the CPU: what would fail or wait on a GPU is found without one.

Its tensors hold their numbers on the CPU, but call themselves tensors of the device "sim". As with CUDA, an operation
on tensors of both devices is an error, and so is reading one without copying it. Each operation that would make the
host wait for the device is counted at the line that asked for it. Autocast casts the inputs of convolutions, matrix
products and torchvision's operations; ranks communicate by gloo. Kernels, streams, memory and nccl are not simulated.

    python -m tests.simulated_device tools/benchmark.py gpu --small
"""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torchvision  # noqa: F401  (its operators)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.common.ranks import process_group
from tests.pretrain.ranks import START_METHOD
from transfer import distributed as transfer_distributed

aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}
# The indexed tensor's device counts; indices may be on the CPU.
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
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
_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm)
_HALF = [aten.conv2d.default, aten.conv_transpose2d.input, *(product.default for product in _PRODUCTS)]  # of autocast
_FLOAT32 = [torch.ops.torchvision.roi_align.default, torch.ops.torchvision.nms.default]
_ROOT = Path(__file__).parents[1]
_libraries: list[torch.library.Library] = []  # registered as long as they exist


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device; `host` has its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        device: Any = "sim:0"
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, layout=host.layout, device=device
        )
        wrapper.host = host
        return wrapper

    def __repr__(self) -> str:
        return f"{self.host!r} on sim"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy; copy it to the CPU first")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:  # files contain CPU tensors
        return self.host.__reduce_ex__(protocol)

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
    """Register the device in torch. This is done once per process, and cannot be undone."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    _setup_privateuseone_for_python_backend("sim", backend_module=Backend())
    libraries = {
        name: torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("aten", "torchvision", "_")
    }
    libraries["_"].fallback(torch.library.fallthrough_kernel)
    for operations, is_half in ((_HALF, True), (_FLOAT32, False)):
        for operation in operations:
            libraries[operation.namespace].impl(operation, functools.partial(_run_in_precision, operation, is_half))
    _libraries.extend(libraries.values())


def _run_in_precision(operation: Any, is_half: bool, *args: Any) -> Any:
    keys: Any = torch._C.DispatchKey  # whose stubs lack one
    dtype = torch.get_autocast_dtype("sim") if is_half else torch.float32
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(keys.AutocastPrivateUse1)):
        cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        result = operation(*cast)
    return result.to(args[0].dtype) if operation == torch.ops.torchvision.roi_align.default else result


def become_device() -> SimulatedDevice:
    """Make it the device of both stages for the rest of this process, unless a config chooses the CPU."""
    register()
    join = functools.partial(_init, process_group.init_process_group)
    process_group.init_process_group = transfer_distributed.join = join
    return SimulatedDevice().__enter__()


def _init(join_ranks: Callable[[str, str], torch.device], name: str = "auto", key: str = "DEVICE") -> torch.device:
    host = join_ranks("cpu", key)
    return host if name == "cpu" else torch.device("sim:0")


@contextlib.contextmanager
def start_process(prepare: Callable[[], object]) -> Iterator[Callable]:
    """Start a process that has the device; yield a function that calls another one there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(START_METHOD), prepare) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def _run(func: Any, args: Any, kwargs: dict[str, Any], waits: collections.Counter | None) -> Any:
    tensors = list(_list_tensors((*args, *kwargs.values())))
    inputs = [x for x in tensors if isinstance(x, DeviceTensor)]
    device = kwargs.get("device")
    if not inputs and (device is None or torch.device(device).type != "sim"):
        return func(*args, **kwargs)
    if func not in _COPIES:
        loose = [x for x in tensors if not isinstance(x, DeviceTensor) and x.ndim > 0]
        if func in _INDEXED and isinstance(args[0], DeviceTensor):
            loose = [x for x in loose if x.dtype not in (torch.long, torch.bool, torch.uint8)]
        if loose and inputs:
            raise RuntimeError(
                f"{func}: expected all tensors on the same device, found {tuple(inputs[0].shape)} on sim and "
                f"{tuple(loose[0].shape)} on cpu"
            )
    if waits is not None:
        reason = _wait(func, args, kwargs)
        if reason:
            waits[reason, _caller()] += 1
    if device is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    host_args = _map_tensors(DeviceTensor, lambda x: x.host, args)
    host_kwargs = {name: _map_tensors(DeviceTensor, lambda x: x.host, value) for name, value in kwargs.items()}
    result = _SYNC_BN.get(func, func)(*host_args, **host_kwargs)
    if torch.Tag.inplace_view in func.tags:  # unsqueeze_ and its like change the shape, so the outer tensor's too
        with no_dispatch():
            func(*args, **kwargs)
    if device is not None and torch.device(device).type != "sim":
        return result
    same = {id(x.host): x for x in inputs}
    if isinstance(args[0] if args else None, torch.Tensor) and not isinstance(args[0], DeviceTensor) and device is None:
        return args[0] if result is args[0] else _map_tensors(torch.Tensor, DeviceTensor, result)
    return _map_tensors(torch.Tensor, lambda x: same[id(x)] if id(x) in same else DeviceTensor(x), result)


def _list_tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _list_tensors(value)


def _map_tensors(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Replace the tensors of a kind in a tensor, list or tuple, several times as fast as torch's pytree."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map_tensors(kind, function, part) for part in value])
    return value


# SyncBN's kernels, which torch has on GPUs only. C: channels, R: ranks.


def _bn_stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    var_C, mean_C = torch.var_mean(x, [0, 2, 3], correction=0)
    return mean_C, (var_C + eps).rsqrt()


def _bn_gather(_x, mean_RC, invstd_RC, running_mean_C, running_var_C, momentum, eps, count_R):
    total = count_R.sum()
    fraction_R1 = (count_R / total)[:, None]
    mean_C = (fraction_R1 * mean_RC).sum(0)
    var_C = (fraction_R1 * (invstd_RC**-2 - eps + (mean_RC - mean_C) ** 2)).sum(0)
    running_mean_C.lerp_(mean_C, momentum)
    running_var_C.lerp_(var_C * total / (total - 1), momentum)
    return mean_C, (var_C + eps).rsqrt()


def _bn_apply(x, weight_C, bias_C, mean_C, invstd_C, eps):
    return torch.addcmul(_by_channel(bias_C), x - _by_channel(mean_C), _by_channel(invstd_C * weight_C))


def _bn_backward_reduce(dy, x, mean_C, invstd_C, *_: Any):
    sum_C = dy.sum([0, 2, 3])
    product_C = (dy * (x - _by_channel(mean_C))).sum([0, 2, 3])
    return sum_C, product_C, product_C * invstd_C, sum_C


def _bn_backward_apply(dy, x, mean_C, invstd_C, weight_C, sum_C, product_C, count_R):
    centered = x - _by_channel(mean_C)
    correction = (_by_channel(sum_C) + centered * _by_channel(invstd_C**2 * product_C)) / count_R.sum()
    return (dy - correction) * _by_channel(invstd_C * weight_C)


def _by_channel(x_C: torch.Tensor) -> torch.Tensor:
    return x_C[:, None, None]


_SYNC_BN = {
    aten.batch_norm_stats.default: _bn_stats,
    aten.batch_norm_gather_stats_with_counts.default: _bn_gather,
    aten.batch_norm_elemt.default: _bn_apply,
    aten.batch_norm_backward_reduce.default: _bn_backward_reduce,
    aten.batch_norm_backward_elemt.default: _bn_backward_apply,
}


def _wait(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Return why the host would wait for the device, or an empty string."""
    if func in _WAITS:
        return str(func)
    if func is aten.copy_.default:
        from_device = isinstance(args[1], DeviceTensor)
        to_device = isinstance(args[0], DeviceTensor)
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        return "copy between devices" if from_device != to_device and not non_blocking else ""
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


def _caller() -> str:
    """Return the innermost line of the call stack that belongs to this project."""
    frame = sys._getframe(2)
    while frame:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


if __name__ == "__main__":
    from tests import simulated_device  # this file's own classes would be others

    simulated_device.become_device()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
