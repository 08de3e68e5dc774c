"""Starting stages on this machine or on a SLURM cluster; the only importer of submitit."""

# What replaces the options of earlier versions, on the command line or in the site file.
MOVED_OPTIONS = {
    "setup": "write the lines into the site file, as setup: [module load cuda] (docs/tutorials/slurm.md)",
    "signal-delay": "write it into the site file, as signal-delay: 120 (docs/tutorials/slurm.md)",
    "cpu-partition": "write it into the site file, as cpu: {partition: NAME} (docs/tutorials/slurm.md)",
    "detach": "run the command in tmux, or by nohup; jobs of SLURM run without it",
}
# What to use instead of sbatch's options where the launcher has its own.
_GPUS = "use --gpus (in the site file gpus), the number per node"
_TASKS = "use --tasks (in the site file tasks), the number per node"
_TIMEOUTS = "use --max-timeouts (in the site file max-timeouts), the number of requeues after time limits"
OWN_OPTIONS = {
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "tres-per-task": _GPUS,
    "ntasks": _TASKS,
    "ntasks-per-node": _TASKS,
    "requeue": _TIMEOUTS,
    "no-requeue": _TIMEOUTS,
    "signal": MOVED_OPTIONS["signal-delay"],
    "array": "stages of a pipeline that wait for no other are an array; --parallel says how many run at once",
    "job-name": "jobs are named after their folders",
}
