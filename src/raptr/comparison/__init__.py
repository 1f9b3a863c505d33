"""Compare training methods on equal terms: a small YAML file becomes runs, and the runs become tables and a plot."""

from raptr.comparison.run import Asked, Compared, compare, compare_all
from raptr.comparison.spec import Comparison, read_comparison, read_file

__all__ = ["Asked", "Compared", "Comparison", "compare", "compare_all", "read_comparison", "read_file"]
