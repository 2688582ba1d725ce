"""What a policy is simulated against: requests, engines, slices, and the capacity there is."""
