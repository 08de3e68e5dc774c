"""Reads the formats of weights files, which their content tells apart: torch's, pickles of arrays, and safetensors."""

import argparse
import codecs
import collections
import contextlib
import io
import json
import pickle
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..files import explain_content, read_start

OTHER_COPY = "use an earlier or another copy"
_OTHER = "it may be an archive (unpack it) or of JAX, Keras, NumPy, ONNX or TensorFlow (convert its weights to PyTorch)"
_LEGACY = torch.serialization.MAGIC_NUMBER.to_bytes(10, "little")  # near the start of a file of torch before 1.6
_REBUILD = {  # NumPy's functions for an array in protocols 0 to 4, a scalar, and an array in protocol 5
    "multiarray._reconstruct": np.zeros(1).__reduce__()[0],
    "multiarray.scalar": np.float32(1).__reduce__()[0],
    "numeric._frombuffer": np.zeros(1).__reduce_ex__(5)[0],
}
_ALLOWED: dict[str, Any] = {  # in a pickle, besides plain types; none of them runs code of the file
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": codecs.encode,
    "collections.OrderedDict": collections.OrderedDict,
    "__builtin__.bytes": bytes,
    "builtins.bytes": bytes,
    **{f"numpy.{core}.{name}": rebuild for core in ("core", "_core") for name, rebuild in _REBUILD.items()},
}
_NUMPY_TYPES = [type(np.dtype(code)) for code in "?bhilqBHILQefdFDU"]
_ALLOWED_BY_TORCH: list[Any] = [argparse.Namespace, *_NUMPY_TYPES, *((f, name) for name, f in _ALLOWED.items())]
# Keeps the tensors, numbers and texts in dictionaries and modules; it contains no single quotes.
_RESAVE = (
    'import pickle, torch; keep = lambda x: keep(x.state_dict()) if hasattr(x, "state_dict") else '
    '{{k: keep(v) for k, v in x.items() if isinstance(v, (dict, int, float, str)) or hasattr(v, "shape") or '
    'hasattr(v, "state_dict")}} if isinstance(x, dict) else x; torch.save(keep({load}), {output})'
)


def read_content(path: Path) -> Any:
    """Read a file of any of the formats.

    Raises:
        pickle.UnpicklingError: it contains more than tensors, arrays and plain types.
        Exception: it is damaged, or of none of the formats.
    """
    start = read_start(path)
    if start[8:10] == b'{"' and not _is_torch(path):
        return _read_safetensors(path)
    if _is_pickle(path):
        return _read_pickle(path)
    description = describe_other(path)
    if description:
        raise ValueError(description)
    return load_torch(path)


def build_resave_command(path: Path) -> str:
    """Build the command that re-saves the tensors and plain values of a file, without its other objects.

    It unpickles the objects, so it runs their code, and their classes must be installed.
    """
    source = json.dumps(str(path))
    output = json.dumps(str(path.with_name(f"plain_{path.stem}.pth")))
    load = f'torch.load({source}, map_location="cpu", weights_only=False)'
    if _is_pickle(path):
        load = f'pickle.load(open({source}, "rb"), encoding="latin1")'
    return f"python -c {shlex.quote(_RESAVE.format(load=load, output=output))}"


def _is_torch(path: Path) -> bool:
    return zipfile.is_zipfile(path) or _LEGACY in read_start(path)[:32]


def _is_pickle(path: Path) -> bool:
    return not _is_torch(path) and (read_start(path).startswith(pickle.PROTO) or path.suffix == ".pkl")


def describe_other(path: Path) -> str:
    """Describe a file that is not a checkpoint, with the remedy; return "" for any other."""
    start = read_start(path)
    if not start.strip(b"\0"):
        return f"it is empty, or zeros that a full or failing disk left; {OTHER_COPY}"
    if b'"weight_map"' in start or path.name.endswith(".index.json"):
        return "it is the index of weights in several files; merge them into one, and pass it"
    explanation = explain_content(start)
    if explanation:
        return explanation
    names: list[str] = []
    with contextlib.suppress(zipfile.BadZipFile):  # no zip file, or its list of names is damaged
        names = zipfile.ZipFile(path).namelist()
    if any(name.endswith("/models/model.json") for name in names):
        return f"it is an exported program; save torch.export.load({str(path)!r}).state_dict and name that file"
    if any(name.endswith("/constants.pkl") for name in names):
        return f"it is a TorchScript program; save torch.jit.load({str(path)!r}).state_dict() and name that file"
    is_weights = start.startswith((b"PK", pickle.PROTO)) or _LEGACY in start[:32] or start[8:10] == b'{"'
    if is_weights and (not names or any(name.endswith("/data.pkl") for name in names)):
        return ""
    return _OTHER


def load_torch(path: Path, mmap: bool = False) -> Any:
    """Load a torch file to the CPU: tensors, plain types, NumPy's arrays and ``argparse.Namespace``.

    Args:
        mmap: map a file of torch 1.6 or later without reading its tensors; their checksums are not verified then.

    Raises:
        pickle.UnpicklingError: it contains anything else (the message names it).
        Exception: it is damaged, or not a torch file.
    """
    is_zip = zipfile.is_zipfile(path)
    if is_zip and not mmap:
        with zipfile.ZipFile(path) as archive:
            name = archive.testzip()  # torch does not verify the checksums
            if name:
                raise ValueError(f"{name} does not match its checksum")
    try:
        with torch.serialization.safe_globals(_ALLOWED_BY_TORCH):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except pickle.UnpicklingError as error:  # torch advises to run the file's code; only the reason is of use
        raise pickle.UnpicklingError(str(error).rpartition("WeightsUnpickler error: ")[2]) from error


def _read_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {"model": tensors, "provenance": (file.metadata() or {}).get("provenance")}


def _read_pickle(path: Path) -> Any:
    content = io.BytesIO(path.read_bytes())
    return _ArrayUnpickler(content, encoding="latin1").load()  # Latin-1: Python 2's text, and its bytes


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"Unsupported GLOBAL {module}.{name}")
        return _ALLOWED[f"{module}.{name}"]
