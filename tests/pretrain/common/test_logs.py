"""Warnings that a user can do nothing about stay off the terminal; all others reach it."""

import subprocess
import sys

WARN = """
import warnings
from pretrain.common.logs import hide_library_warnings

hide_library_warnings()
import logging
import torch
from torch.fx._symbolic_trace import is_fx_tracing

torch.meshgrid(torch.arange(2), torch.arange(3))
torch.jit.script(torch.nn.ReLU())
is_fx_tracing()
logging.getLogger("torch.fx._symbolic_trace").warning("another record")
warnings.warn("torch.meshgrid: called by a user")
"""


def test_only_warnings_about_the_libraries_themselves_are_hidden() -> None:
    done = subprocess.run([sys.executable, "-c", WARN], capture_output=True, text=True, check=True)
    assert "another record" in done.stderr and "called by a user" in done.stderr
    assert not [word for word in ("upcoming release", "deprecated", "is_fx_tracing") if word in done.stderr]
