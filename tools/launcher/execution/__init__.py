"""Execution of stages: processes on this machine and SLURM jobs, their records and states."""
