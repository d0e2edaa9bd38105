"""What requests hold besides pages and rows of the KV pool; the protocol is in resource.py."""
