"""`slicewise order`: what an operator orders against what the platform does by itself."""
