"""What checkpoints.py is made of: Hugging Face configs and models, changed and checked."""
