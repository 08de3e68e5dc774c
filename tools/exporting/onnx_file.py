"""A module -> an ONNX file, which is kept only if ONNX Runtime computes what the module does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from pretrain.common.run_folder import json_text, replacing

OPSET = 18
T = TypeVar("T")


def translate(
    module: nn.Module, input_name: str, shape: Sequence[int], dynamic: Mapping[int, str], outputs: Sequence[str],
    rows: str, translations: Mapping[Any, Any] | None = None,
) -> torch.onnx.ONNXProgram:  # fmt: skip
    """The ONNX program of a module with one input of uint8.

    Args:
        shape: of an example. A map of a single pixel would be taken for a constant size; choose a large enough one.
        dynamic: the dimensions of the input that may have another size, and what to call them.
        rows: what to call the first dimension of the outputs.
        translations: of operators that ONNX does not have.
    """
    example, shapes = torch.zeros(*shape, dtype=torch.uint8), dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC)
    with warnings.catch_warnings(action="ignore"):  # about the exporter's own code
        # The strict mode reads Python's code, so that `len` of a tensor whose length depends on the data is no number.
        exported = torch.export.export(module, (example,), dynamic_shapes=(shapes,), strict=True)
        program = torch.onnx.export(
            exported, input_names=[input_name], output_names=list(outputs), opset_version=OPSET, verbose=False,
            custom_translation_table=dict(translations or {}),
        )  # fmt: skip
    assert program is not None
    named = [(program.model.graph.inputs[0], dynamic), *((value, {0: rows}) for value in program.model.graph.outputs)]
    for value, names in named:
        for dimension, name in names.items():
            value.shape[dimension] = name
    return program


def write(program: torch.onnx.ONNXProgram, output: Path, provenance: Mapping[str, Any], prove: Callable[[Any], T]) -> T:
    """Writes one file, with ``provenance`` as JSON in its metadata, and returns what ``prove`` found.

    Args:
        prove: takes the `run` of an ONNX Runtime session; what it raises leaves nothing behind.
    """
    import onnxruntime

    model = program.model_proto
    model.metadata_props.add(key="provenance", value=json_text(provenance))
    with replacing(output) as stream:
        stream.write(model.SerializeToString())
        stream.flush()
        session = onnxruntime.InferenceSession(stream.name, providers=["CPUExecutionProvider"])
        return prove(session.run)
