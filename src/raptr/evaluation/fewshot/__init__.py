"""Score decoders on few-shot tasks from local files, through lm-eval: `run.fewshot`."""
