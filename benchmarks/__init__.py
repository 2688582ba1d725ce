"""What Slicewise adds to the engine it serves, measured side by side in one run."""
