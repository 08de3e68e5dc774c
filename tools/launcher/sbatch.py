"""Options of sbatch as SLURM's manual describes them: names, variables and those that exclude each other."""

import math
import os
import re
from collections.abc import Collection, Mapping

from pretrain.common.errors import UserError, shorten_list

from . import describe_replacement

# Options that the launcher itself gives to sbatch, for some of which it has its own; the last three submit nothing.
SET_BY_LAUNCHER = (
    *("time", "nodes", "gpus-per-node", "ntasks-per-node", "ntasks", "cpus-per-task", "partition", "account", "signal"),
    *("array", "kill-on-invalid-dep", "job-name", "output", "error", "open-mode", "requeue", "chdir"),
    *("no-requeue", "parsable", "quiet", "wrap", "wait", "test-only", "help", "usage", "version"),
)
# Options of srun that would change the ranks, or where their output goes.
_SET_FOR_SRUN = (
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "export", "output", "error", "multi-prog"),
    *("kill-on-bad-exit", "unbuffered", "relative", "pty", "no-allocate", "jobid", "chdir", "help", "usage", "version"),
)
# Options by which a job asks for GPUs, besides the one that the launcher gives.
_GPU_REQUESTS = ("gres", "gpus", "gpus-per-socket", "gpus-per-task", "tres-per-task")
# Options that fit one kind of node: stages that the site file places on CPU nodes do not inherit them.
NODE_OPTIONS = ("qos", "constraint", "prefer", "gres", "mem", "mem-per-cpu", "exclusive", "reservation", "nodelist")
# Any two options of a line exclude each other. (SLURM accepts the last two lines, but one option then has no effect.)
EXCLUSIVE = (
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("hint", "extra-node-info", "threads-per-core"),
    ("hint", "extra-node-info", "ntasks-per-core"),
    ("core-spec", "thread-spec"),
    ("cpus-per-gpu", "cpus-per-task"),
    ("ntasks-per-gpu", "ntasks-per-node"),
    ("ntasks-per-gpu", "gpus-per-task"),
    ("ntasks-per-gpu", "gpus-per-socket"),
    ("exclusive", "oversubscribe"),
    ("nodelist", "nodefile"),
)
# Options whose SBATCH_ variables have other names.
_VARIABLES = {
    "array": ["array-inx"],
    "cpu-freq": ["cpu-freq-req"],
    "mem": ["mem-per-node"],
    "switches": ["req-switch", "wait4switch"],
    "time": ["timelimit"],
    "verbose": ["debug"],
}
# The options of sbatch; one with a second name follows it and a colon. After ! come no values, ? is an optional one.
# Others, such as those of a site's plugins, are passed on as they are.
_NAMES = """
A:account acctg-freq a:array batch bb bbf b:begin D:chdir cluster-constraint M:clusters cluster:clusters comment
C:constraint container container-id context contiguous! S:core-spec cores-per-socket cpu-freq cpus-per-gpu
c:cpus-per-task deadline delay-boot d:dependency m:distribution e:error x:exclude exclusive? export export-file extra
B:extra-node-info get-user-env? gid gpu-bind gpu-freq G:gpus gpus-per-node gpus-per-socket gpus-per-task gres
gres-flags h:help! hint H:hold! ignore-pbs! i:input J:job-name kill-on-invalid-dep L:licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice? k:no-kill? no-requeue! F:nodefile w:nodelist
N:nodes n:ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node tasks-per-node:ntasks-per-node ntasks-per-socket
ntasks-per-tres open-mode o:output O:overcommit! s:oversubscribe! parsable! p:partition power prefer priority profile
propagate? q:qos Q:quiet! reboot! requeue! reservation signal sockets-per-node spread-job! switches test-only!
thread-spec threads-per-core t:time time-min tmp tres-bind tres-per-task uid usage! use-min-nodes! v:verbose!
V:version! W:wait! wait-all-nodes wckey wrap
"""
_MARKED = [word.rpartition(":")[2] for word in _NAMES.split()]
_LONG = {word.rstrip("!?") for word in _MARKED}
_ALIASES = {word.partition(":")[0]: word.rpartition(":")[2].rstrip("!?") for word in _NAMES.split()}
_FLAGS = {word[:-1] for word in _MARKED if word.endswith("!")}
_NEEDS_VALUE = {word for word in _MARKED if word in _LONG}


def parse_word(text: str) -> tuple[str, str]:
    """Split an option as sbatch takes it, with or without its dashes: ``qos=long``, ``--qos=long``, ``-q long``."""
    name, value = re.fullmatch(r"\s*-*([^=\s]*)[=\s]?(.*)", text, re.DOTALL).groups()  # pyright: ignore
    return name, value.strip()


def name_options(words: Mapping[str, str], source: str, program: str = "sbatch") -> dict[str, str]:
    """Return options by SLURM's long names; true makes one a flag, and false omits it.

    Raises:
        UserError: two of them exclude each other, or a name is ambiguous; ``source`` says where they are.
    """
    options: dict[str, str] = {}
    for word, value in words.items():
        name = word.lstrip("-")
        name = name.replace("_", "-") if len(name) > 1 else name
        name = _find_name(name, source) if program == "sbatch" else name
        if len(name) < 2:
            raise UserError(f"{source}: {name!r} is no long option of {program}; write the long one, such as qos")
        options[name] = "" if value.lower() in ("true", "yes") else value
        if not f"{name}{value}".isprintable():  # a line break would become a line of the script
            raise UserError(f"{source} {name} is {value!r}, which contains unprintable characters; remove them")
        if program == "sbatch":
            _check_value(name, options[name], source)
    given = [name for name, value in options.items() if not is_off(value)]
    for name in given:
        other = next((other for other in given if other in _list_excluded(name)), "")
        if other:
            raise UserError(f"{source}: {name} and {other} exclude each other; give one of them")
    return options


def _check_value(name: str, value: str, source: str) -> None:
    """Check that an option of sbatch has a value if it needs one, and none if it is a flag; any other has either."""
    if name in _NEEDS_VALUE and not value:
        raise UserError(f"{source} {name} has no value; write {name}=VALUE, or omit it")
    if name in _FLAGS and value and not is_off(value):
        raise UserError(f"{source} {name}={value}: sbatch takes no value for it; write {name} alone")


def is_off(value: str) -> bool:
    """Return whether a value omits its option."""
    return value.lower() in ("false", "no")


def _find_name(name: str, source: str) -> str:
    """Return the long name of an option from its short name or its first letters."""
    candidates = sorted(long for long in _LONG if long.startswith(name))
    if name in _LONG or name in _ALIASES or not candidates:
        return _ALIASES.get(name, name)
    if len(candidates) > 1:
        raise UserError(f"{source}: {name!r} is ambiguous; write one of {shorten_list(candidates)}")
    return candidates[0]


def find_option(name: str) -> str:
    """Return the long name of an option of sbatch from any of its names; empty if it has no such option."""
    name = _ALIASES.get(name, name)
    return name if name in _LONG else ""


def merge_options(*layers: Mapping[str, str]) -> dict[str, str]:
    """Merge options of `name_options`; a later layer's option replaces the earlier ones that it excludes."""
    merged: dict[str, str] = {}
    for layer in layers:
        excluded = {other for name in layer for other in _list_excluded(name)}
        merged = {name: value for name, value in merged.items() if name not in excluded} | dict(layer)
    return {name: value for name, value in merged.items() if not is_off(value)}


def keep_for_cpus(options: Mapping[str, str], on_other_nodes: bool) -> dict[str, str]:
    """Return the options that fit a stage without a GPU, which may run on other nodes."""
    unfit = NODE_OPTIONS if on_other_nodes else ()
    return {key: value for key, value in options.items() if key not in unfit and not asks_for_gpus(key, value)}


def omit_nodes(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without those that name nodes: SLURM gives a job at least as many nodes as they name."""
    return {key: value for key, value in options.items() if key not in ("nodelist", "nodefile")}


def check_named_nodes(options: Mapping[str, str], nodes: int) -> None:
    """Raise UserError if ``nodelist`` names more nodes than a job gets: SLURM would use them all."""
    text = options.get("nodelist", "")
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)  # gpu[1-3],m7 has two
    named = sum(math.prod(map(_count_range, re.findall(r"\[([^\]]*)\]", part))) for part in parts)
    if named > nodes:
        problem = f"--sbatch nodelist={text} names {named} nodes, all of which SLURM would use, but --nodes is {nodes}"
        raise UserError(f"{problem}; pass --nodes {named}, or name fewer")


def _count_range(text: str) -> int:
    """Return how many numbers a list such as ``1-3,7`` has."""
    ends = [part.split("-") for part in text.split(",")]
    return sum(int(last[-1]) - int(last[0]) + 1 if "".join(last).isdigit() else 1 for last in ends)


def check_options(options: Mapping[str, str], source: str, has_gpus: bool) -> None:
    """Check that the launcher does not set these options itself."""
    for key, value in options.items():
        is_for_gpus = asks_for_gpus(key, value)
        hint = describe_replacement(key) or "omit it, or use the launcher's own option (launch.py pretrain --help)"
        if is_for_gpus:
            hint = "write --gpus TYPE:NUMBER, as in a100:8 (or --gpus 0 --tasks NUMBER, if the site needs gres)"
        if key in SET_BY_LAUNCHER or (key in _GPU_REQUESTS and is_for_gpus and has_gpus):
            raise UserError(f"{source} {key} is set by the launcher; {hint}")
        other = next((other for other in SET_BY_LAUNCHER if other in _list_excluded(key)), "")
        if other:
            raise UserError(f"{source} {key} excludes {other}, which is set by the launcher; {hint}")


def list_variables(options: Collection[str]) -> dict[str, str]:
    """Return the SBATCH_ variables of this shell, without those of ``options``, and without GPU options.

    sbatch prefers a variable to the same option in the script, and to one that it excludes.
    """
    names = {*options, *(other for name in options for other in _list_excluded(name))}
    hidden = {variable for name in names for variable in _VARIABLES.get(name, [name])}
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        key = name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name.startswith("SBATCH_") and key not in hidden and not asks_for_gpus(key, value):
            variables[name] = value
    return variables


def check_srun_options(options: Collection[str]) -> None:
    """Check that options of srun, which may be abbreviated, are not those that the launcher sets."""
    for name in options:
        fixed = next((fixed for fixed in _SET_FOR_SRUN if fixed.startswith(name)), "")
        if fixed:
            raise UserError(f"--srun {name} would change {fixed}, which is set by the launcher; omit it")


def asks_for_gpus(key: str, value: str) -> bool:
    """Return whether an option of sbatch is for GPUs, or for shares of one."""
    if key.startswith(("gres", "tres")):
        return bool(re.search("gpu|shard|mps", f"{key}={value}"))
    return "gpu" in key


def count_requested_gpus(options: Mapping[str, str], nodes: int, tasks: int) -> int:
    """Return how many whole GPUs the options ask for by themselves; ``tasks`` are the processes per node."""
    sockets = re.match(r"\d+", options.get("sockets-per-node", ""))
    per_node = {"gpus": 1 / nodes, "gres": 1, "gpus-per-socket": int(sockets[0]) if sockets else 1}
    total = 0
    for name in _GPU_REQUESTS:
        factor = round(nodes * per_node.get(name, tasks))
        for request in options.get(name, "").split(","):
            if request and (name.startswith("gpus") or "gpu" in request):
                number = re.search(r"(?:^|[:=])(\d+)$", request)
                total += factor * int(number[1] if number else 1)
    return total


def _list_excluded(name: str) -> set[str]:
    return {other for group in EXCLUSIVE if name in group for other in group} - {name}
