"""The stages of a pipeline, one per file; `base` says what a stage is."""

# Every stage, and what the command of its name does; those without have no command, or share another stage's.
SUMMARIES = {
    "pretrain": "pretrain with a recipe",
    "knn": "score frozen features with kNN",
    "linear": "train a linear classifier on frozen features",
    "embedding": "draw a t-SNE plot of validation features",
    "convert": "convert a backbone to Detectron2 weights, and verify it",
    "transfer": "fine-tune a detector",
    "evaluation": "",
    "data": "",
    "report": "",
}
# What replaces the stages of earlier versions.
MOVED = {"distributions": "python -m studies.jcl_multikey.similarity RUN ..."}
