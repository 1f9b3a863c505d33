"""BERT: its dimensions (no torch), the model, and its export."""
