"""The devices and links of this machine: found, and measured by the ranks that would use them."""
