"""Implementation of tools/report.py: run folders, the results in them, published results, tables and figures."""
