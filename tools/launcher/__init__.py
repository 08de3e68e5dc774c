"""Starting stages on this machine or on a SLURM cluster; the only importer of submitit."""

# What replaces the options of earlier versions, on the command line or in the site file.
MOVED_OPTIONS = {
    "setup": "write the lines into the site file, as setup: [module load cuda] (docs/tutorials/slurm.md)",
    "signal-delay": "write it into the site file, as signal-delay: 120 (docs/tutorials/slurm.md)",
    "cpu-partition": "write it into the site file, as cpu: {partition: NAME} (docs/tutorials/slurm.md)",
    "detach": "run the command in tmux, or by nohup; jobs of SLURM run without it",
}
