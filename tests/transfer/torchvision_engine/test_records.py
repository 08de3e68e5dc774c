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


def test_they_reach_workers_that_are_not_forked():
    assert names(pickle.loads(pickle.dumps(Records(PLAIN)))) == names(Records(PLAIN))
