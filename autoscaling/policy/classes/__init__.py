"""What is known of a compute class: its times, its losses, when it is out of stock, what ends."""
