"""Starting stages on this machine or on a SLURM cluster; the only importer of submitit."""

# What replaces the options of earlier versions, on the command line or in the site file.
MOVED_OPTIONS = {
    "setup": "write the lines into the site file, as setup: [module load cuda] (docs/tutorials/slurm.md)",
    "signal-delay": "write it into the site file, as signal-delay: 120 (docs/tutorials/slurm.md)",
    "cpu-partition": "write it into the site file, as cpu: {partition: NAME} (docs/tutorials/slurm.md)",
    "detach": "run the command in tmux, or by nohup; jobs of SLURM run without it",
}
# The options of the launcher that are used instead of sbatch's of another name, and what they mean.
RENAMED_OPTIONS = {
    **dict.fromkeys(("gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"), "gpus"),
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "tasks"),
    **dict.fromkeys(("requeue", "no-requeue"), "max-timeouts"),
}
_MEANINGS = {
    "gpus": "the number per node",
    "tasks": "the number per node",
    "max-timeouts": "the number of requeues after time limits",
}
# What there is instead of those where the launcher has no option.
AUTOMATIC_OPTIONS = {
    "signal": MOVED_OPTIONS["signal-delay"],
    "array": "stages of a pipeline that wait for no other are an array; --parallel says how many run at once",
    "job-name": "jobs are named after their folders",
}


def format_option(name: str) -> str:
    """Return the option of the command line for a field of `JobOptions`."""
    return "--" + name.replace("_", "-")


def describe_option(option: str) -> str:
    """Return where to write an option of the launcher, and what it means if that is not what SLURM's means."""
    return ", ".join(filter(None, [f"use --{option} (in the site file {option})", _MEANINGS.get(option)]))


def describe_replacement(option: str) -> str:
    """Return what to use instead of an option of sbatch; empty if the launcher has nothing of another name for it."""
    return describe_option(RENAMED_OPTIONS[option]) if option in RENAMED_OPTIONS else AUTOMATIC_OPTIONS.get(option, "")
