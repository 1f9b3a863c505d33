"""How a model becomes a deeper one: the plan (no torch), and its application to tensors."""

from raptr.growth.plan import Growth, Moments, Rule, centred, inserted, repeated, stacked

__all__ = ["Growth", "Moments", "Rule", "centred", "inserted", "repeated", "stacked"]
