"""The training loop and all around a run: configuration, optimizers, checkpoints, execution, plans and exports."""
