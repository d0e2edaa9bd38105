"""What `train_tiny.py` is made of: text that it generates, the model's forward pass, the weights it starts from."""
