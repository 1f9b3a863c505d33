"""The methods inside other people's training loops: each loop has a module of its own, which imports its package.

`steps` is for any PyTorch loop (`raptr.stepwise`), `transformers` for Hugging Face's `Trainer`, `lightning` for
Lightning's.
"""
