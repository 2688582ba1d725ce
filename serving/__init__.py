"""The Serve application of Slicewise: gateway, token link, engines, slices."""
