"""What one layout needs and how long its step takes: work, price, memory."""
