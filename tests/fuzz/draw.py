"""How mutated files are drawn from valid contents, in the formats that the readers know."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

import torch
import yaml

from tests.fuzz import mutate

_TENSORS = (
    torch.zeros(()), torch.zeros(0), torch.zeros(2, 3), torch.full((64,), float("nan")),
    torch.ones(64, dtype=torch.int64),
    torch.ones(64).to_sparse(), torch.empty(64, device="meta"), torch.ones(64, dtype=torch.complex64), -torch.ones(64),
    torch.ones(64, dtype=torch.float8_e4m3fn), torch.zeros(1).expand(10**6),
)  # fmt: skip


def text(values: list[Any]) -> Callable[[random.Random], bytes]:
    """YAML: three of four files have a changed value, the others a changed byte."""
    texts = [yaml.safe_dump(value).encode() for value in values]

    def draw(rng: random.Random) -> bytes:
        if rng.randrange(4) == 0:
            return mutate.data(rng, texts)
        changed = mutate.value(rng, rng.choice(values))
        return yaml.dump(changed, allow_unicode=rng.random() < 0.5).encode(errors="surrogatepass")

    return draw


def as_json(values: list[Any]) -> Callable[[random.Random], bytes]:
    texts = [json.dumps(value).encode() for value in values]

    def draw(rng: random.Random) -> bytes:
        if rng.randrange(4) == 0:
            return mutate.data(rng, texts)
        return json.dumps(mutate.value(rng, rng.choice(values))).encode()

    return draw


def as_torch(values: list[Any]) -> Callable[[random.Random], bytes]:
    files = [_saved(value) for value in values]

    def draw(rng: random.Random) -> bytes:
        how = rng.randrange(4)
        if how == 0:
            return mutate.data(rng, files)
        if how == 1:
            return _changed_inside(rng, rng.choice(files))
        return _saved(mutate.value(rng, rng.choice(values), _TENSORS))

    return draw


def _changed_inside(rng: random.Random, file: bytes) -> bytes:
    """With changed bytes in its pickle, or in a tensor, and checksums that are right."""
    file_made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as archive, zipfile.ZipFile(file_made, "w") as made:
        names = archive.namelist()
        pickled = [name for name in names if name.endswith("/data.pkl")]
        which = rng.choice(names if rng.randrange(8) == 0 else pickled)
        for name in names:
            content = archive.read(name)
            changed = mutate.data(rng, [content]) if name == which else content
            made.writestr(zipfile.ZipInfo(name), changed)  # without the time of day: the same bytes on every day
    return file_made.getvalue()


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
