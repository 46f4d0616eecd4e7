"""Language models: the Falcon-H1 hybrid, whose halves are a Llama and a Mamba-2."""
