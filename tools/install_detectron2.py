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
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.run_folder import atomic_write

URL = "https://github.com/facebookresearch/detectron2"
COMMIT = "02b5c4e295e990042a714712c21dc79b731e8833"
# The build imports torch. It therefore runs in this environment and needs these (pkg_resources: setuptools < 82).
_BUILD_TOOLS = ("setuptools<82", "wheel", "ninja")
_GIT_MINUTES, _PIP_MINUTES = 10, 60  # at most; a build usually takes some minutes


def cached_wheel(compiled: bool) -> Path | None:
    """The cached wheel of the pinned commit, or None; a compiled wheel also serves where ``compiled`` is False."""
    wheels = [wheel for wheel in sorted(_cache_folder(True).glob("detectron2-*.whl")) if "none-any" not in wheel.name]
    if not compiled:
        wheels += sorted(_cache_folder(False).glob("detectron2-*.whl"))
    return wheels[0] if wheels else None


def install(wheel: Path) -> None:
    """Installs the wheel and its dependencies."""
    _pip("install", "--force-reinstall", "--no-deps", str(wheel))
    _pip("install", str(wheel))


def build(source: str, compiled: bool) -> Path:
    """Builds the wheel and puts it in the cache.

    Args:
        source: a local checkout; empty: upstream.
        compiled: with the C++ extension.

    Raises:
        UserError: no such checkout, another commit, no network, no compiler, a cache that cannot be written.
    """
    _pip("install", *_BUILD_TOOLS)
    with tempfile.TemporaryDirectory(prefix="detectron2-") as folder:
        tree, out = Path(folder) / "detectron2", Path(folder) / "wheel"
        _copy_checkout(Path(source), tree) if source else _fetch(tree)
        if not compiled:
            setup = tree / "setup.py"
            setup.write_text(setup.read_text().replace("ext_modules=get_extensions()", "ext_modules=[]"))
        print(f"building Detectron2{' with its compiled part, for several minutes' if compiled else ''}", flush=True)
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(tree))
        (built,) = out.glob("detectron2-*.whl")
        kept = _cache_folder(compiled) / built.name
        atomic_write(kept, built.read_bytes())
        return kept


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="", metavar="FOLDER", help="a local checkout of Detectron2")
    parser.add_argument("--compiled", action="store_true", help="also build the C++ extension")
    parser.add_argument("--cached-only", action="store_true", help="install the cached wheel, if any; never build one")
    args = parser.parse_args(argv)
    wheel = cached_wheel(args.compiled)
    if wheel is None and args.cached_only:
        return 0
    wheel = wheel or build(args.source, args.compiled)
    install(wheel)
    print(f"Detectron2 installed from {wheel} (delete that file to build it again)")
    return 0


def _cache_folder(compiled: bool) -> Path:
    """Its name holds everything that the wheel depends on."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-to-transfer"
    if not compiled:
        return root / f"detectron2-{COMMIT[:8]}-pure"
    import torch

    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return root / f"detectron2-{COMMIT[:8]}-{python}-torch{torch.__version__}"


def _copy_checkout(source: Path, target: Path) -> None:
    """Copies the checkout, because a build writes into its tree."""
    if not (source / "setup.py").is_file() or not (source / "detectron2").is_dir():
        raise UserError(f"DETECTRON2={source} is not a checkout of Detectron2 (it has no setup.py beside detectron2/)")
    head = _run(["git", "-C", str(source), "rev-parse", "HEAD"], _GIT_MINUTES)
    commit = head.stdout.strip()
    if head.returncode == 0 and (source / ".git").exists() and commit != COMMIT:
        raise UserError(f"{source} is at commit {commit[:8]}, not {COMMIT[:8]}; run git -C {source} checkout {COMMIT}")
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info"))


def _fetch(target: Path) -> None:
    target.mkdir()
    steps = (["init", "-q"], ["fetch", "-q", "--depth", "1", URL, COMMIT], ["checkout", "-q", "FETCH_HEAD"])
    for step in steps:
        done = _run(["git", "-C", str(target), *step], _GIT_MINUTES)
        if done.returncode:
            reason = " ".join(done.stderr.split())
            raise UserError(
                f"cannot fetch {URL} at {COMMIT[:8]} ({reason}); on a machine without internet, copy a checkout there "
                "and run make detectron2 DETECTRON2=/path/to/it"
            )


def _pip(*words: str) -> None:
    done = _run([sys.executable, "-m", "pip", "-q", *words], _PIP_MINUTES)
    if done.returncode:
        tail = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"error", line, re.IGNORECASE)]
        raise UserError(f"pip {words[0]} failed: " + " | ".join(tail[-3:] or done.stderr.splitlines()[-3:]))


def _run(command: list[str], minutes: float) -> subprocess.CompletedProcess[str]:
    """Runs a command and all that it starts (compilers), for at most so many minutes.

    Raises:
        UserError: it took longer.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=60 * minutes)
        except BaseException as error:  # also Ctrl-C, which does not reach the command in its own session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise UserError(
                    f"{shlex.join(command)} did not end within {minutes:g} minutes and was stopped; check the network "
                    "and the load of this machine, then run it again"
                ) from error
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


if __name__ == "__main__":
    run_command_line(main)
