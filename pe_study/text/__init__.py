"""What data.py is made of: sources, corpora, tokenizers, and the documents that evaluations read."""
