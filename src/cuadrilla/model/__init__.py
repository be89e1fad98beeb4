"""The `Task` protocol, GPT-2 as one readable file, the language-model task, generation, and Hugging Face folders."""
