"""What a chip costs: a dated table of list prices with its sources, and its reader."""
