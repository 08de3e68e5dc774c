"""What a recipe costs on a GPU: hours, memory, workers and learning rate, computed from FLOPs and published rates.

This is the only model of cost. `published` has the rates and their sources, and the runs that the model is checked
against.
"""
