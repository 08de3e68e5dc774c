"""The files of a run folder that more than one module names."""

CONFIG = "config.yaml"  # resolved
ENVIRONMENT = "environment.txt"
EVENTS = "events.out.tfevents.*"  # of TensorBoard
INITIAL_WEIGHTS = "initial_weights.json"  # of a fine-tuning: where its backbone comes from
LAUNCH_FOLDER = "launch"  # what the launcher writes: its record, and logs and scripts of jobs
LAUNCH = f"{LAUNCH_FOLDER}/launch.json"
LOG = "log.txt"
METRICS = "metrics.json"
RESULTS = "results.json"
STATE = "state.json"
VIEWS = "views.png"  # of a pretraining
CHECKPOINTS = "checkpoint_*.pth"  # of pretraining and linear probes
DETECTORS = "model_*.pth"  # checkpoints of detectors
