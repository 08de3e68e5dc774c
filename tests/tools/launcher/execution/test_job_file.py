"""A job works in the launcher's folder and with the modules of its submission, or says why not."""

import sys
from pathlib import Path

import pytest

from pretrain.common.config import extensions
from tests.errors import refused
from tests.tools.launcher.helpers import CONFIGS, build_pretrain, fake
from tools.launcher.execution.job_file import name_job_file, open_stage, read_job, write_job

RECIPE = CONFIGS / "examples/demo_jcl_R18_digits.yaml"


def submit(folder: Path, data: str) -> Path:
    """Write the file of a job in ``folder``, as a launcher that works there does; return it."""
    file = name_job_file(folder / "launch/s")
    write_job(file, build_pretrain(RECIPE, ["DATA.TRAIN", data]))
    return file


def test_relative_names_are_those_of_the_launchers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    relative = submit(tmp_path, "folder:data")
    absolute = submit(tmp_path / "absolute", "folder:/data")
    monkeypatch.chdir("/")  # as a setup line or SLURM does
    assert open_stage(read_job(relative)).list_data()[0] == "folder:data"
    assert Path.cwd() == here
    monkeypatch.chdir("/")
    here.rename(tmp_path / "gone")
    text = refused(lambda: open_stage(read_job(relative)), f"folder:data is relative to {here}, which", "does not have")
    assert "absolute names" in text
    assert open_stage(read_job(absolute)).list_data()[0] == "folder:/data"
    here.symlink_to(tmp_path / "gone")  # as a node mounts the folder under another name
    assert open_stage(read_job(relative)).list_data()[0] == "folder:data"
    assert Path.cwd() == tmp_path / "gone"
    record = read_job(relative)
    del record["cwd"]  # of an earlier version
    assert open_stage(record).list_data()[0] == "folder:data"


def test_a_job_runs_with_the_modules_of_its_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / "my_data.py"
    module.write_text("size = 1")
    monkeypatch.setenv(extensions.VARIABLE, str(module))
    file = submit(tmp_path, "folder:/data")
    write_job(tmp_path / "report.json", fake(tmp_path))
    open_stage(read_job(file))
    module.write_text("size = 2")
    refused(lambda: open_stage(read_job(file)), "modules have changed: my_data.py,", "restore them, or run the orig")
    open_stage(read_job(tmp_path / "report.json"))  # which uses none of them
    module.write_text("size = 1")
    open_stage(read_job(file))
