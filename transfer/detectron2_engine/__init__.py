"""The reference engine: Detectron2, and what fine-tuning needs beyond Detectron2's default trainer.

Model, solver, data and evaluators are Detectron2's, and an iteration of `transfer.train` is that of its DefaultTrainer.
In addition there are

- exact resume: random choices are functions of the seed and the iteration, so that a resumed run has the result of an
  uninterrupted one. Detectron2 restarts its stream of images, and its draws depend on all earlier ones.
- strict weights: a file that does not fit ends the run, instead of leaving a part of the backbone at random values.
- an agreed stop: a request on any rank ends all of them after the same iteration, with a checkpoint.
- atomic checkpoints: a file is complete, and its weights are finite, or it is not written.
- statistics of batch normalization that agree across ranks after precise BN, and SyncBN for several CPU processes.
- data sets named by two paths, and one schema of results for both engines.
"""
