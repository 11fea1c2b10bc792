"""Where bytes live: lent GPU pages and the tiers below them."""
