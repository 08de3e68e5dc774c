"""Records of stages that an earlier version started: today's code finds the same work in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.stages.registry import build_stage

RECORDS: dict[str, Any] = json.loads((Path(__file__).parent / "stages.json").read_text())


@pytest.mark.parametrize("name", RECORDS)
def test_a_recorded_stage_is_the_same_work(name: str):
    record = RECORDS[name]
    stage = build_stage(record["spec"])
    assert stage.identity == record["work"]
    assert stage.fingerprint() == record["fingerprint"]
    assert build_stage(json.loads(json.dumps(stage.to_json()))) == stage
