"""Judge a pretrained encoder by fine-tuning it on tasks such as GLUE's; `finetune` is in `raptr.evaluation.run`."""
