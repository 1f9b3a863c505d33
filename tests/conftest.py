"""Shared by all tests: one thread a worker, since two workers share two cores and would wait for each other."""

import torch

torch.set_num_threads(1)
