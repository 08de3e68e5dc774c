"""Installs Detectron2 into the environment that runs this file, from a wheel that is built once per machine.

Detectron2 is not on the package index. The wheel is kept in the user's cache, outside the checkout, so that new
checkouts install it from there.

    make detectron2                                # upstream's repository, at the pinned commit
    make detectron2 DETECTRON2=/a/local/checkout   # a machine without internet
    make detectron2 COMPILED=1                     # with its compiled part, which takes several minutes

Without its compiled part, Detectron2 lacks deformable convolutions, rotated boxes and a faster COCO evaluation. Nothing
in this project calls them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line

URL = "https://github.com/facebookresearch/detectron2"
COMMIT = "02b5c4e295e990042a714712c21dc79b731e8833"
_PIP = (sys.executable, "-m", "pip", "-q")
# The build imports torch. It therefore runs in this environment and needs these (pkg_resources: setuptools < 82).
_BUILD_TOOLS = ("setuptools<82", "wheel", "ninja")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="", metavar="FOLDER", help="a local git checkout of Detectron2")
    parser.add_argument("--compiled", action="store_true", help="also build the C++ extension")
    parser.add_argument("--cached-only", action="store_true", help="install the cached wheel, if any; never build one")
    args = parser.parse_args(argv)
    wheels = [wheel for kind in {True, args.compiled} for wheel in _cache_folder(kind).glob("*.whl")]
    if not wheels and args.cached_only:
        return
    wheel = min(wheels, key=lambda path: "none-any" in path.name) if wheels else _build(args.source, args.compiled)
    _run(*_PIP, "install", "--force-reinstall", "--no-deps", str(wheel))
    _run(*_PIP, "install", str(wheel))
    print(f"Detectron2 installed from {wheel} (delete that file to build it again)")


def _build(source: str, compiled: bool) -> Path:
    """The wheel of the pinned commit of a local checkout or of upstream, in the cache."""
    _run(*_PIP, "install", *_BUILD_TOOLS)
    with tempfile.TemporaryDirectory(prefix="detectron2-") as tree:
        _run("git", "init", "-q", tree)
        _run("git", "-C", tree, "fetch", "-q", "--depth", "1", os.path.abspath(source) if source else URL, COMMIT)
        _run("git", "-C", tree, "checkout", "-q", "FETCH_HEAD")
        if not compiled:
            setup = Path(tree) / "setup.py"
            setup.write_text(setup.read_text().replace("ext_modules=get_extensions()", "ext_modules=[]"))
        print(f"building Detectron2{' with its compiled part, for several minutes' if compiled else ''}", flush=True)
        _run(*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(_cache_folder(compiled)), tree)
    (wheel,) = _cache_folder(compiled).glob("*.whl")
    return wheel


def _cache_folder(compiled: bool) -> Path:
    """Its name holds everything that the wheel depends on."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-to-transfer"
    if not compiled:
        return root / f"detectron2-{COMMIT[:8]}-pure"
    import torch

    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return root / f"detectron2-{COMMIT[:8]}-{python}-torch{torch.__version__}"


def _run(*command: str) -> None:
    """Runs a command, which says itself what went wrong."""
    if status := subprocess.run(command).returncode:
        raise UserError(
            f"{' '.join(command)} ended with status {status} (above); on a machine without internet, copy a git "
            "checkout of Detectron2 there and run make detectron2 DETECTRON2=/path/to/it"
        )


if __name__ == "__main__":
    run_command_line(main)
