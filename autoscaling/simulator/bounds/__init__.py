"""What a day costs those who know it beforehand: a lower bound, and a plan that can be followed.

No policy that keeps the service level costs less than `lower_bound`. `hindsight` is a plan that
somebody could have carried out; it is neither the cheapest one nor a floor.
"""
