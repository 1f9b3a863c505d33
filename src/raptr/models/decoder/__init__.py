"""A decoder with Llama's architecture: its dimensions (without torch), the model, and its export."""
