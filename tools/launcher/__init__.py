"""Starting stages on this machine or on a SLURM cluster; the only importer of submitit."""
