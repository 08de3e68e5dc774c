"""Reads the tensors of a file of weights, without running any code that it contains."""

import contextlib
import errno
import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, count_noun, first_line, shorten_list
from ..files import check_file, sha256
from .formats import OTHER_COPY, build_resave_command, describe_other, read_content
from .provenance import Provenance
from .records import read_record

COUNTER = "num_batches_tracked"  # batch norm's counter, which no forward pass reads and old files lack
FOR_PRETRAINING = " (with --to-torchvision for pretraining and probes)"  # ends the commands that errors advise
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # parts of names to drop
_NOT_PLAIN = re.compile("GLOBAL|Can only|Trying to call|operand 149")  # 149: a protocol that torch reads only unsafely


class Damaged(UserError):
    """The content of a file cannot be read as a checkpoint, now or ever; an earlier checkpoint may serve instead."""


@dataclass(frozen=True)
class WeightsFile:
    """The content of a weights file.

    Attributes:
        path: its path.
        sha256: SHA-256 of its bytes, in hexadecimal.
        content: everything in it; in addition to the weights, a checkpoint has `epoch`, `arch`, `config`, ...
        tensors: all tensors in its dictionaries and lists except those of optimizers. A name is the path of keys to the
            tensor, joined by dots, without the names of `WRAPPERS` unless they tell two tensors apart.
        provenance: what is recorded of the file (`records.read_record`); None if nothing is.
    """

    path: Path
    sha256: str
    content: dict[str, Any]
    tensors: dict[str, Tensor]
    provenance: Provenance | None


def read_weights_file(path: str | Path) -> WeightsFile:
    """Read weights in any format, and verify them against the SHA-256 in FILE.json if a conversion wrote it.

    Raises:
        UserError: the file is missing, unreadable, damaged, changed since its conversion, or contains anything other
            than tensors, arrays and plain types.
    """
    path = Path(path)
    content = read(path)
    stored = dict(_walk(content)) or dict(_walk(content, lists=True))
    short = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in stored}
    counts = Counter(short.values())
    tensors = {short[name] if counts[short[name]] == 1 else name: tensor for name, tensor in stored.items()}
    if not tensors:
        entries = shorten_list([str(key) for key in content]) or "an empty dictionary"
        raise UserError(f"{path} contains no tensors, only {entries}; pass a file with the weights of a network")
    digest = sha256(path)
    return WeightsFile(path, digest, content, tensors, read_record(path, digest, content, tensors))


def read(path: str | Path) -> dict[str, Any]:
    """Read a torch file (zip, or of torch before 1.6), a pickle of arrays or a safetensors file to the CPU.

    Raises:
        Damaged: it is not a complete file of its format (the message says what it is).
        UserError: it is missing or contains anything other than tensors, arrays and plain types, or the disk or the
            memory failed.
    """
    path = check_file(path, "checkpoint")
    try:
        content = read_content(path)
    except Exception as error:  # a damaged pickle raises anything
        if isinstance(error, pickle.UnpicklingError) and _NOT_PLAIN.search(str(error)):
            problem = f"{path} contains more than dense tensors, arrays and plain types"
            remedy = "if you trust its source, re-save its tensors where the file was written, and use the new file"
            raise UserError(f"{problem}; {remedy}: {build_resave_command(path)}") from error
        is_disk = isinstance(error, OSError) and error.errno != errno.EINVAL  # EINVAL: a damaged offset
        if is_disk or isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise UserError(f"cannot read {path}: {first_line(error)}; check permissions, disk and memory") from error
        reason = describe_other(path) or f"{first_line(error).partition('. ')[0].rstrip('.')}; {OTHER_COPY}"
        raise Damaged(f"{path} is damaged or not a checkpoint: {reason}") from error
    if isinstance(content, (list, tuple)):
        return {str(number): item for number, item in enumerate(content)}
    if not isinstance(content, dict):
        raise Damaged(f"{path} contains a {type(content).__name__}, not a dictionary of tensors; pass a state dict")
    return content


def compute_tensor_digest(*tensors: Tensor) -> str:
    """Return 16 hexadecimal digits that change with any value, shape or type of ``tensors``."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def check_values(tensor: Tensor, name: str, path: str | Path) -> Tensor:
    """Check a tensor and return it as float32, or a counter as int64.

    Raises:
        UserError: integers, values that are not finite in float32, or a variance below 0.
    """
    is_counter = name.endswith(COUNTER)
    if tensor.is_meta or tensor.layout != torch.strided:
        raise UserError(f"{path}: {name} is not a dense tensor with values; save it as one")
    if not (tensor.is_floating_point() or is_counter):
        raise UserError(f"{path}: {name} is {tensor.dtype}, not floating point; convert it to float32")
    tensor = tensor if is_counter else tensor.to(torch.float32)
    count = int((~torch.isfinite(tensor)).sum())
    if count:
        raise UserError(f"{path}: {name} has {count_noun(count, 'value')} not finite; use an earlier checkpoint")
    if name.endswith("running_var") and (tensor < 0).any():
        raise UserError(f"{path}: {name} has a variance below 0; use an earlier checkpoint")
    return tensor.to(torch.long) if is_counter else tensor


def _walk(content: Any, path: str = "", *, lists: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested dictionaries, and in ``lists``, with its path; skip optimizers."""
    containers = (dict, list, tuple) if lists else dict
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError):  # an array of text; else a copy, writable and in this byte order
                value = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        if isinstance(value, Tensor):
            yield f"{path}{key}", value.detach()
        elif isinstance(value, containers) and not str(key).startswith("opt"):
            yield from _walk(value, f"{path}{key}.", lists=lists)
