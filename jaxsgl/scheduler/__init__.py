"""Which request runs when: queue, admission, decode set, stop checks. Plain Python and NumPy, no device, no I/O."""
