"""How a model becomes a larger one: the plan (no torch), and its application to tensors."""
