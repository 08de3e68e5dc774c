"""Starting stages on this machine or on a SLURM cluster; the only importer of submitit."""

# What replaces the stages of earlier versions.
MOVED = {"distributions": "python -m studies.jcl_multikey.similarity RUN ..."}
