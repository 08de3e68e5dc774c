"""The processes of a run: `parent` starts and watches those of one machine, `rank` is what each runs, in a `meeting`
they wait for one another."""
