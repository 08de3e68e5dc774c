"""The registry of methods, by name; each method's own file declares it."""

from __future__ import annotations

from . import jcl, moco, multikey, ressl, sce, supcon, tcl
from .method import LossOutput, Method

METHODS: dict[str, Method] = {
    "mocov1": moco.METHOD,
    "mocov2": moco.METHOD,
    "multikey": multikey.METHOD,
    "jcl": jcl.METHOD,
    "sce": sce.METHOD,
    "ressl": ressl.METHOD,
    "tcl": tcl.METHOD,
    "supcon": supcon.METHOD,
    "simclr": supcon.SIMCLR,
}

__all__ = ["METHODS", "LossOutput"]
