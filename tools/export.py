"""Exports a backbone to timm, transformers or ONNX, and verifies the result.

python tools/export.py runs/jcl_R50_IN1k_200ep exports/jcl_timm --format timm
python tools/export.py runs/jcl_R50_IN1k_200ep exports/jcl --format transformers
python tools/export.py runs/jcl_R50_IN1k_200ep exports/jcl.onnx --format onnx
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.files import check_name, existing_file, write_error

_NEEDS = {"timm": (), "transformers": ("transformers",), "onnx": ("onnxscript", "onnxruntime")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="run folder or file (.pth, .pkl, .safetensors)")
    parser.add_argument("output", metavar="OUTPUT", help="a new folder; for onnx, a new file that ends in .onnx")
    parser.add_argument("--format", choices=list(_NEEDS), required=True, help="what will read it")
    args = parser.parse_args(argv)
    check_name(args.output, "OUTPUT")
    source, output = Path(args.source), Path(args.output)
    if not os.path.isdir(source):
        existing_file(source, "run folder or checkpoint")
    if (output.suffix == ".onnx") != (args.format == "onnx"):
        raise UserError(f"OUTPUT {output} must {'' if args.format == 'onnx' else 'not '}end in .onnx")
    if os.path.lexists(output):
        raise UserError(f"{output} exists; name another, or remove it first")
    if missing := [name for name in _NEEDS[args.format] if find_spec(name) is None]:
        raise UserError(f"--format {args.format} needs {', '.join(missing)}; install it: pip install -e '.[export]'")
    from tools.exporting import backbone  # imports torch; a mistake should not wait for that

    try:
        done = backbone.export(backbone.read(source), output, args.format)
    except OSError as error:
        if error.errno is None:  # of a library, which is no failure of the disk
            raise
        raise write_error(output, error) from error
    found = ", ".join(f"{name} {error:.1e}" for name, error in done.items())
    print(f"{source} -> {output}\none image through both: largest relative difference {found}")


if __name__ == "__main__":
    run_command_line(main)
