"""The methods in other people's training loops. Each trainer has its own module, the only one to import its package.

`steps` is for any PyTorch loop (`raptr.stepwise`), `transformers` for Hugging Face's `Trainer`, `lightning` for
Lightning's.
"""
