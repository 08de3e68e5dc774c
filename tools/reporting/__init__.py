"""What tools/report.py is made of: the files it reads, what they say about a run, and the papers' numbers."""
