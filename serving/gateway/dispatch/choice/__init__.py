"""Where a request goes: what is known of engines and their caches, and the choice of one."""
