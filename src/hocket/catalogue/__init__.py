"""Data with one loader each: what is known about models before anything runs, with its source."""
