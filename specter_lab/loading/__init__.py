"""Models from and to disk: checkpoints read an expert at a time, and prepared folders."""
