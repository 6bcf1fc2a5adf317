"""Hydra's launcher ``forge``: ``python train.py -m hydra/launcher=forge``."""
