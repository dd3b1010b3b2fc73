"""Software that trains in a layout: what each version of it can express, and its flags."""
