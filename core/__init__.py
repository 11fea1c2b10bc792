"""The rules: blocks, hashes, index, leases, plans and transfers, on the standard library alone."""
