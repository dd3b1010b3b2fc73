"""The words everything is made of. Standard library only; imports nothing of ours above."""
