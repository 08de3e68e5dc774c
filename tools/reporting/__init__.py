"""What tools/report.py is made of: the files it reads, the results in them, and published results."""
