"""Judge decoders by few-shot tasks, through lm-eval, from local files: `run.fewshot`."""
