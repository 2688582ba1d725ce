"""What TPU hosts are like: rights, kernel, disk, memory, and what runs beside Ray on them."""
