"""Holds files that engines load or leave behind: weights, compiled programs, and their stores."""
