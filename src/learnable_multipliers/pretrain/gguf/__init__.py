"""GGUF files, the format of llama.cpp, of Falcon-H1 hybrids and Llamas."""
