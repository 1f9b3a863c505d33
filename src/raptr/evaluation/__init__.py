"""Score models on tasks: encoders by fine-tuning (`run.finetune_all`), decoders by few-shot tasks (`fewshot`)."""
