"""What a run leaves behind: the trace, the metrics computed from it, and its export."""
