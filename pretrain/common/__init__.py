"""What both stages share: errors, the config language, the run folder, requests to stop."""
