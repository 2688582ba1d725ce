"""How models share the chips of a compute class: a quota, its shares, and what may go at once."""
