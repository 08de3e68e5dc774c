"""The processes of a run: `parent` starts and watches those of one machine, `environment` tells each its place, `rank`
is what each runs. They join a `process_group`, wait for one another in a `meeting`, and come to an `agreement`."""
