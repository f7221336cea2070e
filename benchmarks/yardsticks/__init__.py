"""Plain loops and other tools: what the product is compared with."""
