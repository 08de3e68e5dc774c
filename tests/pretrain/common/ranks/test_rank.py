"""What a rank records of its error: once, whether the stage has started or not."""

import json
import socket
from pathlib import Path
from unittest import mock

import pytest

from pretrain.common.errors import ProcessLost, UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.ranks.rank import record_error
from pretrain.common.run import state
from pretrain.common.run.stage import enter_run_folder
from pretrain.common.run.state import RunContext
from tests.errors import refused


@pytest.mark.parametrize("has_started", [True, False])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("the value is 3; it must be 2"), "the value is 3; it must be 2"),
        (ValueError("a bug"), "ValueError: a bug"),
        (ProcessLost("another process has ended"), "another process has ended"),
    ],
)
def test_an_error_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str, has_started: bool
) -> None:
    monkeypatch.setenv("RANK", "0")
    write_json = mock.Mock(wraps=state.write_json)
    monkeypatch.setattr(state, "write_json", write_json)
    file = tmp_path / "failed.0.json"
    with pytest.raises(SystemExit if isinstance(error, UserError) else type(error)), record_error(tmp_path, "s"):
        if has_started:
            with enter_run_folder("knn", tmp_path, RunContext(submission="s")):
                raise error
        raise error
    assert [call.args[0] for call in write_json.mock_calls].count(file) == 1
    record = json.loads(file.read_text())
    assert type(error).__name__ in record.pop("traceback") and record.pop("ended") > 0
    assert record == {
        "rank": 0,
        "host": socket.gethostname(),
        "job": "s",
        "error": text,
        "user_error": isinstance(error, UserError),
        "followed": isinstance(error, ProcessLost),
    }


def test_a_stage_without_a_parent_records_its_error_itself(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        with enter_run_folder("knn", tmp_path, RunContext()):
            raise error

    refused(lambda: fail(UserError("the value is 3; it must be 2")), "the value is 3")
    record = json.loads((tmp_path / "failed.0.json").read_text())
    assert (record["job"], record["error"]) == ("", "the value is 3; it must be 2")
    with pytest.raises(Stopped):
        fail(Stopped("SIGTERM"))
    assert not list(tmp_path.glob("failed.*"))
