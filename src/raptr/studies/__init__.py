"""Studies that reproduce tables and figures of the RaPTr paper."""
