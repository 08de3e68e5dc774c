"""The processes of a run: `parent` starts and watches those of one machine, `environment` tells each its place, `rank`
is what each runs, and in a `meeting` they wait for one another."""
