"""Engine: what the ranks of a replica run; importing the package alone imports no torch."""
