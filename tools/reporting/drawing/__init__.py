"""Figures, curves and the HTML page of a report."""
