"""Models in GGUF files, the format of llama.cpp, read into Hugging Face folders."""
