"""One job from its options to its end. Everything below is imported inside functions."""
