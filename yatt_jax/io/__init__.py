"""Reading and writing models: Hugging Face folders, GGUF files, exports."""
