"""Holds the prices of chips: a dated table of list prices with its sources, and its reader."""
