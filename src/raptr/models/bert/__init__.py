"""BERT: its dimensions (without torch), the model, and its export."""
