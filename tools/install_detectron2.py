"""Installs Detectron2 into the environment that runs this file, from a wheel that is built once per machine.

Detectron2 is not on the package index. The wheel is kept in the user's cache, so that new checkouts install it from
there. It is built without its C++ extension (deformable convolutions, rotated boxes), which this project does not call.

    make detectron2                                # upstream's repository, at the pinned commit
    make detectron2 DETECTRON2=/a/local/checkout   # a machine without internet
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
_BUILD_TOOLS = ("setuptools<82", "wheel")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="", metavar="FOLDER", help="a local git checkout of Detectron2")
    parser.add_argument("--cached-only", action="store_true", help="install the cached wheel, if any; never build one")
    args = parser.parse_args(argv)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-to-transfer"
    cache = root / f"detectron2-{COMMIT[:8]}-pure"
    if not list(cache.glob("*.whl")):
        if args.cached_only:
            return
        _build(os.path.abspath(args.source) if args.source else URL, cache)
    (wheel,) = cache.glob("*.whl")
    _run(*_PIP, "install", "--force-reinstall", "--no-deps", str(wheel))
    _run(*_PIP, "install", str(wheel))
    print(f"Detectron2 installed from {wheel} (delete that file to build it again)")


def _build(source: str, cache: Path) -> None:
    """Puts the wheel of the pinned commit of ``source`` into ``cache``."""
    _run(*_PIP, "install", *_BUILD_TOOLS)
    with tempfile.TemporaryDirectory(prefix="detectron2-") as tree:
        _run("git", "init", "-q", tree)
        _run("git", "-C", tree, "fetch", "-q", "--depth", "1", source, COMMIT)
        _run("git", "-C", tree, "checkout", "-q", "FETCH_HEAD")
        setup = Path(tree) / "setup.py"
        setup.write_text(setup.read_text().replace("ext_modules=get_extensions()", "ext_modules=[]"))
        _run(*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(cache), tree)


def _run(*command: str) -> None:
    """Runs a command, whose own output says what went wrong."""
    if status := subprocess.run(command).returncode:
        raise UserError(
            f"{' '.join(command)} ended with status {status} (above); on a machine without internet, copy a git "
            "checkout of Detectron2 there and run make detectron2 DETECTRON2=/path/to/it"
        )


if __name__ == "__main__":
    run_command_line(main)
