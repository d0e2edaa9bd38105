"""Ownership of pages: free list, radix tree, page tables. Plain Python and NumPy; holds no device memory."""
