"""Device interface, slot pools and kernels."""
