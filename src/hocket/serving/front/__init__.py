"""Front: requests on their way from a caller to a replica and back; imports no torch."""
