"""How a model becomes a larger one: the plan of a growth (no torch), and its application to tensors."""
