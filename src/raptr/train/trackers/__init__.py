"""Trackers: where a run's numbers go besides `metrics.jsonl`. One file for each tracker, one registry."""
