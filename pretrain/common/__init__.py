"""What both stages share: errors, the config language, the run folder, stop requests, the process group, readers."""
