"""The parts of train_tiny.py: generated text, the model's forward pass, and the weights that training starts from."""
