"""How a model becomes a larger one: the plan (no torch), and its application to tensors."""

from raptr.growth.plan import Growth, Moments, Rule, Units, added, centred, inserted, repeated, stacked

__all__ = ["Growth", "Moments", "Rule", "Units", "added", "centred", "inserted", "repeated", "stacked"]
