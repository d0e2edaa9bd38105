"""The parts of make/model.py: generated text, the model's forward pass, and the weights that training starts from."""
