"""Records come back as they were packed, whole or in part."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from transfer.torchvision_engine.records import Records

PLAIN = [{"file_name": f"{i}.jpg", "annotations": [{"box": np.arange(i)}] * i} for i in range(5)]


def names(records: Records) -> list[str]:
    return [record["file_name"] for record in records]


def test_they_are_what_was_packed():
    records = Records(iter(PLAIN))
    assert len(records) == 5 and names(records) == [one["file_name"] for one in PLAIN]
    assert records[3]["annotations"][2]["box"].tolist() == [0, 1, 2]
    records[3]["file_name"] = "changed"  # of a copy
    assert records[3]["file_name"] == "3.jpg"
    with pytest.raises(IndexError):
        records[5]
    assert list(Records(())) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 3), (3, None), (2, 2), (4, 1)])
def test_a_part_shares_their_bytes(start: int, stop: int | None):
    whole = Records(PLAIN)
    part = whole[start:stop]
    assert names(part) == [one["file_name"] for one in PLAIN[start:stop]]
    assert part._bytes is whole._bytes
    assert names(pickle.loads(pickle.dumps(part))) == names(part)  # for workers that are not forked
