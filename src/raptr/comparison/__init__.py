"""Training methods on equal terms: a small YAML becomes runs, and the runs a table and a plot."""

from raptr.comparison.run import Compared, compare
from raptr.comparison.spec import Comparison, read_comparison, read_file

__all__ = ["Compared", "Comparison", "compare", "read_comparison", "read_file"]
