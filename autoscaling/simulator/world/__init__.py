"""Models the world of a simulated policy: requests, engines, slices, and the capacity there is."""
