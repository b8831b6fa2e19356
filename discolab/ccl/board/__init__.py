"""What is known of the collectives of a session: pure state, and what can be concluded from it."""
