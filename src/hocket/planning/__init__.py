"""From a model and a cluster to the best layout, without torch."""
