"""`slicewise status`: what a gateway and the cluster say of the fleet, and what is wrong in it."""
