"""HTTP: the routes of a server and what they answer."""
