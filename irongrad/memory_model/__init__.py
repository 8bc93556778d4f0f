"""What a step keeps in memory, when, and what it would cost to compute it again."""
