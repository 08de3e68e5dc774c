"""The processes of a run on one machine: `parent` starts and watches them, `rank` is what each of them runs."""
