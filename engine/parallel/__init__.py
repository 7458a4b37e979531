"""Several worker processes under one engine: tensor and pipeline parallel."""
