"""Slicewise's Serve application: gateway, token link, engines, slices."""
