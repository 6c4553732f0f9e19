"""Data: tokenizer and chat template, readers of each format, and the pipeline that serves prompts."""
