"""Export a backbone to a folder for timm and transformers, or to an ONNX file, and verify the result.

python tools/export.py runs/jcl_R50_IN1k_200ep --format timm --output exports/jcl
python tools/export.py runs/jcl_R50_IN1k_200ep --format onnx --output exports/jcl.onnx
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.export")

from pretrain.common.command_line import Parser
from pretrain.common.errors import UserError
from pretrain.common.files import build_write_error, check_file, check_output_path


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="run folder or file (.pth, .pkl, .safetensors)")
    parser.add_argument("--format", choices=("timm", "onnx"), required=True, help="output format")
    text = "new folder; for onnx, a new file that ends in .onnx"
    parser.add_argument("--output", metavar="PATH", required=True, help=text)
    args = parser.parse_args(argv)
    check_output_path(args.output, "--output", is_file=args.format == "onnx")
    source = Path(args.source)
    output = Path(args.output)
    if not os.path.isdir(source):
        check_file(source, "run folder or checkpoint")
    if (output.suffix == ".onnx") != (args.format == "onnx"):
        raise UserError(f"--output {output} must {'' if args.format == 'onnx' else 'not '}end in .onnx")
    if os.path.lexists(output):
        raise UserError(f"{output} exists; choose another output, or remove it first")
    if args.format == "onnx" and not (find_spec("onnxscript") and find_spec("onnxruntime")):
        raise UserError("--format onnx needs onnxscript and onnxruntime; install them: pip install -e '.[export]'")
    from tools.exporting import formats  # imports torch; a user's mistake should not wait for that
    from tools.exporting.source import read_export_source

    export = formats.export_onnx if args.format == "onnx" else formats.export_timm
    try:
        differences = export(read_export_source(source), output)
    except OSError as error:
        if error.errno is None:  # raised by a library, not by the file system
            raise
        raise build_write_error(output, error) from error
    summary = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    print(f"backbone of {source} -> {output}\nlargest relative difference, one image through both: {summary}")
