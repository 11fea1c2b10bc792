"""Text that the demo reads: the Constitution of the United States, in the public domain."""
