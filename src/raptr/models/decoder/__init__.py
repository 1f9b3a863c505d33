"""A decoder of Llama's kind: its dimensions (no torch), the model, and its export."""
