"""A weights file and what it becomes: where it is, how it is read and verified, and how a detector loads it."""
