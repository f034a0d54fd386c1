"""How fast the secure sum is: against Flower's SecAgg+, against the bare cipher, and as the cohort grows."""
