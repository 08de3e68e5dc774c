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
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.launch")

from pretrain.common.command_line import Parser
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError
from tools.launcher.commands import Commands, check_command, list_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; only the command that it names is given its options."""
    modules, words = extensions.take_options(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    with extensions.using(modules):
        commands = list_commands()
        is_option = command.startswith("-")  # such as --help
        if command and not is_option and not any(command in group for group in commands.values()):
            extensions.load()  # a user's module may register a stage of this name
            commands = list_commands()
        parser = _build_parser(commands, {command})
        if not words:
            parser.print_help()
            return 2
        if not is_option:
            check_command(command, commands)
        args, args.overrides = parser.parse_known_args(words)
        _check_options(args)
        if args.starts_jobs:
            _refuse_torchrun()
        if args.overrides and not args.takes_overrides:
            keys = "; OVERRIDES and TRANSFER_OVERRIDES in its file change keys, and --output the folder"
            hint = keys if command == "pipeline" else ""
            problem = f"{command}: unexpected argument {args.overrides[0]!r}"
            raise UserError(f"{problem}; this command takes no KEY VALUE pairs{hint}")
        return args.run(args) or 0


def _build_parser(commands: Commands, chosen: Collection[str]) -> argparse.ArgumentParser:
    """Build the parser; only the ``chosen`` commands get their options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(usage="launch.py COMMAND ...", description=__doc__, formatter_class=raw)
    choices = parser.add_subparsers(dest="command", required=True, prog="launch.py", help=argparse.SUPPRESS)
    lines = []
    for title, group in commands.items():
        lines += [f"{title}:", *(f"  {name:<15}{text}" for name, (text, _) in group.items()), ""]
        for name, (text, add_options) in group.items():
            sub = choices.add_parser(name, description=text)
            sub.set_defaults(parser=sub, takes_overrides=False, starts_jobs=False)
            if name in chosen:
                add_options(sub)
    parser.epilog = "\n".join(lines)
    return parser


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that the command does not have; say what replaces those of SLURM or earlier versions.

    The parser left them among the KEY VALUE pairs, whose values may begin with a dash.
    """
    words = args.overrides
    options = [word for place, word in enumerate(words) if re.match("--" if place % 2 else "--|-[A-Za-z]", word)]
    if not options:
        return
    if args.starts_jobs:
        from tools.launcher.job_options import find_replacement

        for word in options:
            option = re.sub(r"^(-[A-Za-z])\d+$|=.*", r"\1", word)  # of -N2 or --nodes=2
            replacement = find_replacement(option.lstrip("-"), args.absent_options)
            if replacement:
                raise UserError(f"launch.py {args.command} has no option {option}; {replacement}")
    overrides.check_options(options, args.parser, args.command)


def _refuse_torchrun() -> None:
    """Raise UserError in a process of torchrun, each of which would start another run."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        instead = "run it without torchrun, or run torchrun -m pretrain or torchrun transfer/train_net.py"
        raise UserError(f"launch.py starts the processes itself (--gpus N, or --tasks N on CPUs); {instead}")
