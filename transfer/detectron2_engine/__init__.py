"""The reference engine: Detectron2's model, solver, mappers and evaluators, trained by `transfer.train`.

It adds batches from any position of Detectron2's stream of images, whose random choices are functions of the seed and
the position, and SyncBN for several CPU processes.
"""
