"""Where a run's numbers go besides `metrics.jsonl`: one file per tracker, one registry."""
