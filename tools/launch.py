"""Start stages on this machine or on a SLURM cluster, and show, follow, cancel and resume them.

    python tools/launch.py pretrain --method jcl
    python tools/launch.py linear runs/jcl_R50_IN1k_200ep
    python tools/launch.py convert runs/jcl_R50_IN1k_200ep weights/jcl_R50_IN1k_200ep.pth
    python tools/launch.py transfer --config-file configs/coco_R50_FPN_1x_jcl.yaml
    python tools/launch.py pipeline configs/examples/demo.yaml
    python tools/launch.py paper configs/papers/sce_table2_linear.csv --rows cifar100
    python tools/launch.py pretrain --method jcl --cluster slurm --gpus 8 --time 4:00:00 --dry-run
    python tools/launch.py recipes cifar
    python tools/launch.py status runs/jcl_R50_IN1k_200ep

KEY VALUE pairs override the config. A run folder that contains part of the same run is resumed.
`launch.py COMMAND --help` lists the options of a command, and `launch.py COMMAND --help-keys` the keys of its config.
"""

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # makes the packages importable when run as a file

from pretrain.common.command_line import Parser, run_command_line
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError
from tools.launcher.commands import list_commands
from tools.stages import MOVED


def main(argv: Sequence[str] | None = None) -> int:
    modules, words = extensions.take_options(sys.argv[1:] if argv is None else argv)
    with extensions.using(modules):
        if (
            words and not words[0].startswith("-") and not _is_command(words[0])
        ):  # a user's module may register a stage of this name
            extensions.load()
        parser = _build_parser(words[:1])
        if not words:
            parser.print_help()
            return 2
        if words[0] in MOVED:
            raise UserError(f"launch.py no longer has the command {words[0]}; run {MOVED[words[0]]}")
        return _run_command(*parser.parse_known_args(words))


def _is_command(word: str) -> bool:
    """Return whether the first word of a command line is a command of ours, or an option such as --help."""
    return word.startswith("-") or any(word in group for group in list_commands().values())


def _run_command(args: argparse.Namespace, key_values: list[str]) -> int:
    if hasattr(args, "sbatch"):
        _check_for_moved_options(key_values)
    overrides.check_options(key_values, args.parser, args.command)
    if hasattr(args, "dry_run") and "TORCHELASTIC_RUN_ID" in os.environ:  # each rank would start another run
        instead = "run it without torchrun, or run torchrun -m pretrain or torchrun transfer/train_net.py"
        raise UserError(f"launch.py starts the processes itself (--gpus N, or --tasks N on CPUs); {instead}")
    if key_values and not args.takes_overrides:
        hint = "; OVERRIDES and TRANSFER_OVERRIDES in its file change keys" if args.command == "pipeline" else ""
        problem = f"{args.command}: unexpected argument {key_values[0]!r}"
        raise UserError(f"{problem}; this command takes no KEY VALUE pairs{hint}")
    args.overrides = key_values
    return args.run(args) or 0


def _check_for_moved_options(words: Collection[str]) -> None:
    from tools.launcher.options import find_replacement

    for word in words:
        option = word.partition("=")[0]
        replacement = find_replacement(option[2:]) if option.startswith("--") else ""
        if replacement:
            raise UserError(f"launch.py has no option {option}; {replacement}")


def _build_parser(chosen: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser; only the ``chosen`` commands (default: all) get their options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(usage="launch.py COMMAND ...", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, prog="launch.py", help=argparse.SUPPRESS)
    lines = []
    for title, group in list_commands().items():
        lines += [f"{title}:", *(f"  {name:<15}{text}" for name, (text, _) in group.items()), ""]
        for name, (text, add_options) in group.items():
            sub = commands.add_parser(name, description=text)
            sub.set_defaults(parser=sub, takes_overrides=False)
            if chosen is None or name in chosen:
                add_options(sub)
    parser.epilog = "\n".join(lines)
    return parser


if __name__ == "__main__":
    run_command_line(main)
