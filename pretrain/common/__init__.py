"""Shared by both stages: errors, the config language, the run folder, stop requests, the process group, readers."""
